package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"pixiu"
)

// texts takes the payloads of a number of messages.
func texts(p *play, sub *pixiu.Subscription, count int) ([]string, error) {
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	var found []string
	for len(found) < count {
		message, err := sub.Next(ctx)
		if err != nil {
			return found, fmt.Errorf("after %d of %d messages: %w", len(found), count, err)
		}
		found = append(found, string(message.Payload))
	}
	return found, nil
}

func numbered(count int) []string {
	found := make([]string, count)
	for at := range found {
		found[at] = fmt.Sprintf("m%d", at)
	}
	return found
}

// same compares texts, in order.
func same(found, wanted []string) error {
	if slices.Equal(found, wanted) {
		return nil
	}
	for at := range min(len(found), len(wanted)) {
		if found[at] != wanted[at] {
			return fmt.Errorf("text %d is %q, not %q", at, found[at], wanted[at])
		}
	}
	return fmt.Errorf("%d texts, not %d", len(found), len(wanted))
}

func closedPort() (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer func() { _ = listener.Close() }()
	return listener.Addr().String(), nil
}

// pair is a client and its subscription to the play's room.
func (p *play) pair(options ...pixiu.SubscribeOption) (*pixiu.Client, *pixiu.Subscription, error) {
	px, err := p.client(pixiu.Options{})
	if err != nil {
		return nil, nil, err
	}
	sub, err := px.Subscribe(p.ctx, append(options, pixiu.Rooms(p.seed))...)
	return px, sub, err
}

// proxies asks the registry, or whatever the target is, for the proxies.
func (p *play) proxies() ([]string, error) {
	px, err := p.client(pixiu.Options{})
	if err != nil {
		return nil, err
	}
	return px.Cluster().Proxies, nil
}

func init() {
	scenarios["connect/proxies"] = func(p *play) error {
		whole, err := p.client(pixiu.Options{})
		if err != nil {
			return err
		}
		p.target = whole.Cluster().Proxies[0]
		px, err := p.client(pixiu.Options{})
		if err != nil {
			return err
		}
		found, wanted := px.Cluster(), whole.Cluster()
		return expect(len(found.Proxies) == len(wanted.Proxies) && len(found.Gateways) == len(wanted.Gateways) && len(found.Gateways) > 0,
			"%v, not %v", found, wanted)
	}
	scenarios["connect/registry"] = func(p *play) error {
		if !strings.HasPrefix(p.target, "zk") {
			return errors.New("the harness gave no zk:// target")
		}
		px, err := p.client(pixiu.Options{})
		if err != nil {
			return err
		}
		p.target = px.Cluster().Proxies[0]
		other, err := p.client(pixiu.Options{})
		if err != nil {
			return err
		}
		found, wanted := px.Cluster(), other.Cluster()
		for _, list := range [][]string{found.Proxies, found.Gateways, wanted.Proxies, wanted.Gateways} {
			slices.Sort(list)
		}
		return expect(slices.Equal(found.Proxies, wanted.Proxies) && slices.Equal(found.Gateways, wanted.Gateways), "%v, not %v", found, wanted)
	}
	scenarios["connect/dead_address_first"] = func(p *play) error {
		proxies, err := p.proxies()
		if err != nil {
			return err
		}
		dead, err := closedPort()
		if err != nil {
			return err
		}
		p.target = dead + "," + proxies[0]
		px, err := p.client(pixiu.Options{})
		if err != nil {
			return err
		}
		return px.Room(p.seed).Send(p.ctx, []byte("x"))
	}
	scenarios["connect/unreachable"] = func(p *play) error {
		dead, err := closedPort()
		if err != nil {
			return err
		}
		_, err = pixiu.ConnectWith(p.ctx, dead, pixiu.Options{ConnectTimeout: time.Second})
		return errors.Join(kindOf(err, pixiu.ErrUnreachable), expect(err != nil && strings.Contains(err.Error(), dead), "%v names no address", err))
	}
	scenarios["connect/bad_target"] = func(p *play) error {
		for _, target := range []string{"http://x", "host", "host:0"} {
			if _, err := pixiu.Connect(p.ctx, target); !errors.Is(err, pixiu.ErrInvalidArgument) {
				return fmt.Errorf("%s: %v", target, err)
			}
		}
		return nil
	}
	scenarios["connect/closed"] = func(p *play) error {
		px, err := p.client(pixiu.Options{})
		if err != nil {
			return err
		}
		if err := px.Close(); err != nil {
			return err
		}
		_, err = px.Subscribe(p.ctx, pixiu.Rooms(p.seed))
		return errors.Join(kindOf(px.Room(p.seed).Send(p.ctx, nil), pixiu.ErrNotConnected), kindOf(err, pixiu.ErrNotConnected))
	}
	scenarios["connect/nothing_left"] = func(p *play) error {
		before := runtime.NumGoroutine()
		px, sub, err := p.pair()
		if err != nil {
			return err
		}
		if err := px.Room(p.seed).Send(p.ctx, []byte("x")); err != nil {
			return err
		}
		if _, err := px.User(p.seed).Mail(p.ctx, []byte("x")); err != nil {
			return err
		}
		if _, err := texts(p, sub, 1); err != nil {
			return err
		}
		if err := px.Close(); err != nil {
			return err
		}
		for end := time.Now().Add(5 * time.Second); runtime.NumGoroutine() > before; runtime.Gosched() {
			if time.Now().After(end) { // gRPC's own goroutines end a moment after their connection
				stacks := make([]byte, 1<<20)
				fmt.Fprintln(os.Stderr, string(stacks[:runtime.Stack(stacks, true)]))
				return fmt.Errorf("%d goroutines, %d before", runtime.NumGoroutine(), before)
			}
		}
		return nil
	}
	scenarios["publish/confirmed"] = func(p *play) error {
		px, err := p.client(pixiu.Options{UIN: p.seed + 1})
		if err != nil {
			return err
		}
		sub, err := px.Subscribe(p.ctx, pixiu.Rooms(p.seed))
		if err != nil {
			return err
		}
		if err := px.Room(p.seed).Send(p.ctx, []byte("hello"), pixiu.Type(7)); err != nil {
			return err
		}
		m, err := sub.Next(p.ctx)
		if err != nil {
			return err
		}
		return expect(m.Room == p.seed && m.Sender == p.seed+1 && string(m.Payload) == "hello" && m.Type == 7, "%+v", m)
	}
	scenarios["publish/order"] = func(p *play) error {
		px, sub, err := p.pair()
		if err != nil {
			return err
		}
		for _, text := range numbered(500) {
			if _, err := px.Room(p.seed).SendSoon(p.ctx, []byte(text)); err != nil {
				return err
			}
		}
		found, err := texts(p, sub, 500)
		return errors.Join(err, same(found, numbered(500)))
	}
	scenarios["publish/backpressure"] = func(p *play) error {
		px, err := p.client(pixiu.Options{QueueBytes: 64 << 10, MaxRecordBytes: 32 << 10})
		if err != nil {
			return err
		}
		var receipts []*pixiu.Receipt
		for range 5000 {
			receipt, err := px.Room(p.seed).SendSoon(p.ctx, make([]byte, 1024))
			if err != nil {
				return err
			}
			receipts = append(receipts, receipt)
		}
		for _, receipt := range receipts {
			if err := receipt.Wait(p.ctx); err != nil {
				return err
			}
		}
		return nil
	}
	scenarios["publish/too_large"] = func(p *play) error {
		px, err := p.client(pixiu.Options{MaxRecordBytes: 1000})
		if err != nil {
			return err
		}
		return kindOf(px.Room(p.seed).Send(p.ctx, make([]byte, 1000)), pixiu.ErrRecordTooLarge)
	}
	scenarios["publish/bad_room"] = func(p *play) error {
		px, err := p.client(pixiu.Options{})
		if err != nil {
			return err
		}
		return errors.Join(kindOf(px.Room(0).Send(p.ctx, nil), pixiu.ErrInvalidArgument),
			kindOf(px.Room(1<<62).Send(p.ctx, nil), pixiu.ErrInvalidArgument))
	}
	scenarios["publish/headers"] = func(p *play) error {
		px, sub, err := p.pair()
		if err != nil {
			return err
		}
		if err := px.Room(p.seed).Send(p.ctx, nil, pixiu.Headers(map[string]string{"trace": "3f", "größe": "<ü>"})); err != nil {
			return err
		}
		m, err := sub.Next(p.ctx)
		if err != nil {
			return err
		}
		return expect(m.Headers()["trace"] == "3f" && m.Headers()["größe"] == "<ü>", "%v", m.Headers())
	}
	scenarios["publish/deadline"] = func(p *play) error {
		px, err := p.client(pixiu.Options{})
		if err != nil {
			return err
		}
		over, cancel := context.WithDeadline(p.ctx, time.Now())
		defer cancel()
		err = px.Room(p.seed).Send(over, nil)
		return errors.Join(kindOf(err, context.DeadlineExceeded), kindOf(err, pixiu.ErrNotSent), px.Room(p.seed).Send(p.ctx, nil))
	}
	scenarios["publish/load_test"] = func(p *play) error {
		px, usual, err := p.pair()
		if err != nil {
			return err
		}
		passing, err := px.Subscribe(p.ctx, pixiu.Rooms(p.seed), pixiu.LoadTests(pixiu.PassLoadTests))
		if err != nil {
			return err
		}
		if err := px.Room(p.seed).Send(p.ctx, []byte("marked"), pixiu.MarkLoadTest()); err != nil {
			return err
		}
		if err := px.Room(p.seed).Send(p.ctx, []byte("plain")); err != nil {
			return err
		}
		one, err := texts(p, usual, 1)
		both, also := texts(p, passing, 2)
		return errors.Join(err, also, same(one, []string{"plain"}), same(both, []string{"marked", "plain"}))
	}
	scenarios["signal/confirmed"] = func(p *play) error { return signalled(p, false) }
	scenarios["signal/receipt"] = func(p *play) error { return signalled(p, true) }
	scenarios["signal/undelivered"] = func(p *play) error {
		px, err := p.client(pixiu.Options{})
		if err != nil {
			return err
		}
		_, err = px.Room(p.seed).SignalConfirmed(p.ctx, []byte("x"))
		return kindOf(err, pixiu.ErrUndelivered)
	}
	scenarios["chat/delivered"] = func(p *play) error {
		px, err := p.client(pixiu.Options{UIN: p.seed, Name: "phone"})
		if err != nil {
			return err
		}
		sub, err := px.Subscribe(p.ctx, pixiu.Chat())
		if err != nil {
			return err
		}
		if err := px.User(p.seed).Send(p.ctx, []byte("hi")); err != nil {
			return err
		}
		m, err := sub.Next(p.ctx)
		if err != nil {
			return err
		}
		return expect(m.User == p.seed && m.Room == 0 && string(m.Payload) == "hi", "%+v", m)
	}
	scenarios["chat/offline"] = func(p *play) error {
		px, err := p.client(pixiu.Options{})
		if err != nil {
			return err
		}
		return kindOf(px.User(p.seed).Send(p.ctx, []byte("hi")), pixiu.ErrOffline)
	}
	scenarios["subscribe/from_now"] = func(p *play) error {
		px, err := p.client(pixiu.Options{})
		if err != nil {
			return err
		}
		if err := px.Room(p.seed).Send(p.ctx, []byte("before")); err != nil {
			return err
		}
		sub, err := px.Subscribe(p.ctx, pixiu.Rooms(p.seed))
		if err != nil {
			return err
		}
		for _, text := range numbered(10) {
			if err := px.Room(p.seed).Send(p.ctx, []byte(text)); err != nil {
				return err
			}
		}
		found, err := texts(p, sub, 10)
		return errors.Join(err, same(found, numbered(10)))
	}
	scenarios["subscribe/several_rooms"] = func(p *play) error {
		px, sub, err := p.pair(pixiu.Rooms(p.seed+1, p.seed+2))
		if err != nil {
			return err
		}
		for room := range uint64(4) {
			if err := px.Room(p.seed+3-room).Send(p.ctx, []byte(fmt.Sprint(3-room))); err != nil {
				return err
			}
		}
		found, err := texts(p, sub, 3)
		slices.Sort(found)
		return errors.Join(err, same(found, []string{"0", "1", "2"}))
	}
	scenarios["subscribe/join_leave"] = func(p *play) error {
		px, sub, err := p.pair()
		if err != nil {
			return err
		}
		if err := sub.Join(p.ctx, pixiu.Rooms(p.seed+1)); err != nil {
			return err
		}
		if err := px.Room(p.seed+1).Send(p.ctx, []byte("joined")); err != nil {
			return err
		}
		if err := sub.Leave(p.ctx, pixiu.Rooms(p.seed+1)); err != nil {
			return err
		}
		for room, text := range map[uint64]string{p.seed + 1: "left"} {
			if err := px.Room(room).Send(p.ctx, []byte(text)); err != nil {
				return err
			}
		}
		if err := px.Room(p.seed).Send(p.ctx, []byte("last")); err != nil {
			return err
		}
		found, err := texts(p, sub, 2)
		return errors.Join(err, same(found, []string{"joined", "last"}))
	}
	scenarios["subscribe/free_topic"] = func(p *play) error {
		px, err := p.client(pixiu.Options{})
		if err != nil {
			return err
		}
		one, other := fmt.Sprintf("s%d/one", p.seed), fmt.Sprintf("s%d/other", p.seed)
		sub, err := px.Subscribe(p.ctx, pixiu.FreeTopics(one))
		if err != nil {
			return err
		}
		for _, topic := range []string{other, one} {
			if err := px.FreeTopic(topic).Send(p.ctx, []byte(topic)); err != nil {
				return err
			}
		}
		m, err := sub.Next(p.ctx)
		if err != nil {
			return err
		}
		return expect(m.Topic == one && string(m.Payload) == one, "%+v", m)
	}
	scenarios["subscribe/two_clients"] = func(p *play) error {
		px, first, err := p.pair()
		if err != nil {
			return err
		}
		_, second, err := p.pair()
		if err != nil {
			return err
		}
		for _, text := range numbered(20) {
			if err := px.Room(p.seed).Send(p.ctx, []byte(text)); err != nil {
				return err
			}
		}
		one, err := texts(p, first, 20)
		two, also := texts(p, second, 20)
		return errors.Join(err, also, same(one, numbered(20)), same(two, numbered(20)))
	}
	scenarios["subscribe/close"] = func(p *play) error {
		_, sub, err := p.pair()
		if err != nil {
			return err
		}
		ended := make(chan error, 1)
		go func() { ended <- sub.Run(p.ctx, func(*pixiu.Message) error { return nil }) }()
		return errors.Join(sub.Close(), <-ended)
	}
	scenarios["presence/online"] = func(p *play) error {
		px, err := p.client(pixiu.Options{UIN: p.seed, Name: "phone"})
		if err != nil {
			return err
		}
		if _, err := px.Subscribe(p.ctx, pixiu.Chat()); err != nil {
			return err
		}
		found, err := px.Presence(p.ctx, p.seed, p.seed+1)
		if err != nil {
			return err
		}
		return expect(len(found) == 2 && found[0].Devices == 1 && !found[1].Online(), "%v", found)
	}
	scenarios["events/states"] = func(p *play) error {
		var mu sync.Mutex
		var states []pixiu.ConnectionState
		px, err := p.client(pixiu.Options{OnConnection: func(event pixiu.ConnectionEvent) {
			mu.Lock()
			defer mu.Unlock()
			if event.What == "subscription" {
				states = append(states, event.State)
			}
		}})
		if err != nil {
			return err
		}
		sub, err := px.Subscribe(p.ctx, pixiu.Rooms(p.seed))
		if err != nil {
			return err
		}
		_ = sub.Close()
		mu.Lock()
		defer mu.Unlock()
		return expect(slices.Equal(states, []pixiu.ConnectionState{pixiu.Connected, pixiu.Closed}), "%v", states)
	}
	scenarios["interop/rooms"] = func(p *play) error {
		px, sub, err := p.pair()
		if err != nil {
			return err
		}
		if err := p.do("publish", p.seed, "python"); err != nil {
			return err
		}
		found, err := texts(p, sub, 1)
		if err := errors.Join(err, same(found, []string{"python"}), p.do("listen", p.seed+1)); err != nil {
			return err
		}
		if err := px.Room(p.seed+1).Send(p.ctx, []byte("go")); err != nil {
			return err
		}
		heard, err := p.ask("heard", 1)
		return errors.Join(err, expect(heard == "go", "%q", heard))
	}
	scenarios["reconnect/gateway_killed"] = func(p *play) error {
		gap := make(chan struct{}, 8)
		px, sub, err := p.pair(pixiu.OnGap(func(string) { gap <- struct{}{} }))
		if err != nil {
			return err
		}
		if err := p.do("kill", "gateway", sub.Gateway()); err != nil {
			return err
		}
		select {
		case <-gap:
		case <-time.After(patience):
			return errors.New("no gap was reported")
		}
		if err := sub.Join(p.ctx); err != nil { // settled: the new gateway has confirmed the room
			return err
		}
		if err := px.Room(p.seed).Send(p.ctx, []byte("after")); err != nil {
			return err
		}
		found, err := texts(p, sub, 1)
		return errors.Join(err, same(found, []string{"after"}), p.do("healthy"))
	}
	scenarios["reconnect/gateway_drained"] = func(p *play) error {
		gaps := make(chan string, 8)
		px, sub, err := p.pair(pixiu.OnGap(func(reason string) { gaps <- reason }))
		if err != nil {
			return err
		}
		err = p.through(px, sub, func() error { return p.do("drain", "gateway", sub.Gateway()) }, true)
		select {
		case reason := <-gaps:
			err = errors.Join(err, fmt.Errorf("a gap: %s", reason))
		default:
		}
		return err
	}
	scenarios["reconnect/proxy_killed"] = func(p *play) error {
		px, sub, err := p.pair()
		if err != nil {
			return err
		}
		proxies := px.Cluster().Proxies
		return p.through(px, sub, func() error { return p.do("kill", "proxy", proxies[p.seed%uint64(len(proxies))]) }, false)
	}
	scenarios["reconnect/proxy_drained"] = func(p *play) error {
		px, sub, err := p.pair()
		if err != nil {
			return err
		}
		proxies := px.Cluster().Proxies
		return p.through(px, sub, func() error { return p.do("drain", "proxy", proxies[p.seed%uint64(len(proxies))]) }, true)
	}
	scenarios["secure/tls_and_token"] = func(p *play) error {
		px, sub, err := p.pair()
		if err != nil {
			return err
		}
		if err := px.Room(p.seed).Send(p.ctx, []byte("x")); err != nil {
			return err
		}
		_, err = texts(p, sub, 1)
		return err
	}
	scenarios["secure/wrong_token"] = func(p *play) error {
		_, err := p.client(pixiu.Options{Token: "wrong"})
		return kindOf(err, pixiu.ErrNotAuthenticated)
	}
	scenarios["secure/no_tls"] = func(p *play) error {
		ca := os.Getenv("PIXIU_CA")
		defer func() { _ = os.Setenv("PIXIU_CA", ca) }()
		if err := os.Unsetenv("PIXIU_CA"); err != nil {
			return err
		}
		_, err := p.client(pixiu.Options{ConnectTimeout: 2 * time.Second})
		return kindOf(err, pixiu.ErrUnreachable)
	}
	scenarios["secure/token_function"] = func(p *play) error {
		var asked atomic.Int64
		px, err := p.client(pixiu.Options{TokenSource: func() (string, error) {
			asked.Add(1)
			return os.Getenv("PIXIU_TOKEN"), nil
		}})
		if err != nil {
			return err
		}
		return errors.Join(px.Room(p.seed).Send(p.ctx, nil), expect(asked.Load() > 0, "it was not asked"))
	}
}

func signalled(p *play, receipt bool) error {
	px, sub, err := p.pair()
	if err != nil {
		return err
	}
	if receipt {
		gateways, err := px.Room(p.seed).SignalConfirmed(p.ctx, []byte("signal"))
		if err := errors.Join(err, expect(gateways >= 1, "%d gateways", gateways)); err != nil {
			return err
		}
	} else if err := px.Room(p.seed).Signal(p.ctx, []byte("signal")); err != nil {
		return err
	}
	first, err := sub.Next(p.ctx)
	if err != nil {
		return err
	}
	if err := px.Room(p.seed).Send(p.ctx, []byte("last")); err != nil {
		return err
	}
	found, err := texts(p, sub, 1)
	return errors.Join(err, expect(first.Signal && string(first.Payload) == "signal", "%+v", first), same(found, []string{"last"}))
}

// through sends while something is done to the cluster. Every confirmed message must come, each message at most once, and all must
// be confirmed if they say so.
func (p *play) through(px *pixiu.Client, sub *pixiu.Subscription, harm func() error, all bool) error {
	var mu sync.Mutex
	confirmed, over, failures := map[string]bool{}, make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(failures)
		for at := 0; ; at++ {
			select {
			case <-over:
				return
			default:
			}
			text := fmt.Sprintf("m%d", at)
			err := px.Room(p.seed).Send(p.ctx, []byte(text))
			if err != nil && all {
				failures <- fmt.Errorf("%s: %w", text, err)
				return
			}
			mu.Lock()
			confirmed[text] = err == nil
			mu.Unlock()
		}
	}()
	err := errors.Join(harm(), p.do("healthy"))
	close(over)
	err = errors.Join(err, <-failures, px.Room(p.seed).Send(p.ctx, []byte("end")))
	if err != nil {
		return err
	}
	came := map[string]int{}
	for message, err := range sub.All(p.ctx) {
		if err != nil {
			return err
		}
		came[string(message.Payload)]++
		if string(message.Payload) == "end" {
			break
		}
	}
	for text, sure := range confirmed {
		if sure && came[text] != 1 {
			return fmt.Errorf("%s came %d times", text, came[text])
		}
	}
	return expect(len(confirmed) > 10, "only %d messages were sent", len(confirmed))
}

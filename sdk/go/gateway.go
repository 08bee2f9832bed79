package pixiu

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"pixiu/internal/codec"
	wire "pixiu/wire/v1"
)

const (
	moveJitter = time.Second // clients of a draining gateway leave it at a random moment within this time
	linger     = time.Second // a draining gateway is still read after the new one has confirmed everything
	answers    = 2           // requests that it answers then, before it is left: by then a gateway, or a client, that was slow has caught up
	answerFor  = 5 * time.Second
	askAgain   = time.Second // after a join that a gateway refused for now without naming a time
	maxNames   = 1_000       // rooms, topics and acknowledgements of one request
)

// waiter waits until a gateway has confirmed requests.
type waiter struct {
	waitsFor map[uint64]bool
	lost     *Error // if its stream ends; nil: the next stream answers it
	done     chan error
}

// names are the rooms and topics that a connection wants.
type names struct {
	rooms  map[uint64]bool
	topics map[string]bool
}

func newNames() names { return names{map[uint64]bool{}, map[string]bool{}} }

func (n names) clone() names { return names{maps.Clone(n.rooms), maps.Clone(n.topics)} }

// content is what a Subscription and an Inbox do differently.
type content interface {
	hello() (hello *wire.SubscribeHello)
	take(st *gatewayStream, reply *wire.SubscribeReply, held bool) error // the connection's lock is not held
	opened(st *gatewayStream)
	ended(st *gatewayStream)
	lost(reason string)  // a connection was lost, and another one begins
	overlap(begins bool) // two gateways deliver, or only one does again
	source() interface{ Close() error }
}

// gatewayConn keeps a subscription or an inbox connected to one gateway; when that one leaves, it moves to another.
type gatewayConn struct {
	client  *Client
	what    string
	name    string
	content content
	linger  time.Duration
	ctx     context.Context
	cancel  context.CancelFunc
	over    chan struct{} // closed when the connection has ended

	mu       sync.Mutex
	wanted   names
	stream   *gatewayStream
	waiters  []*waiter
	err      error
	reason   string
	gateway  string
	changed  chan struct{} // closed and replaced when something has changed
	rest     resting
	closed   bool
	answered time.Time
}

func newGatewayConn(client *Client, what, name string, content content) *gatewayConn {
	g := &gatewayConn{
		client: client, what: what, name: name, content: content, linger: linger, over: make(chan struct{}),
		wanted: newNames(), changed: make(chan struct{}), rest: resting{},
	}
	g.ctx, g.cancel = context.WithCancel(client.ctx)
	return g
}

// notify wakes everybody who waits for a change. The lock is held.
func (g *gatewayConn) notify() {
	close(g.changed)
	g.changed = make(chan struct{})
}

func (g *gatewayConn) start() error {
	if err := g.client.add(g.content.source()); err != nil {
		return err
	}
	g.client.tasks.Go(g.run)
	return nil
}

// close ends the connection and waits for it.
func (g *gatewayConn) close() {
	g.mu.Lock()
	already := g.closed
	g.closed = true
	g.notify()
	g.mu.Unlock()
	g.cancel()
	<-g.over
	g.client.forget(g.content.source())
	if !already && g.err == nil {
		g.announce(Closed, "")
	}
}

func (g *gatewayConn) announce(state ConnectionState, reason string) {
	g.mu.Lock()
	address := g.gateway
	g.mu.Unlock()
	g.client.tell(ConnectionEvent{state, g.what, g.content.source(), address, reason})
}

// settle waits until the gateway has confirmed everything that is wanted.
func (g *gatewayConn) settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, g.client.options.JoinTimeout)
	defer cancel()
	w := &waiter{done: make(chan error, 1)}
	g.mu.Lock()
	if g.err != nil {
		defer g.mu.Unlock()
		return g.err
	}
	if g.closed {
		defer g.mu.Unlock()
		return fail(ErrNotConnected, "the %s is closed; make a new one", g.what)
	}
	g.waiters = append(g.waiters, w)
	if g.stream != nil {
		g.catchUp(g.stream)
	}
	g.notify()
	g.mu.Unlock()
	select {
	case err := <-w.done:
		return err
	case <-g.over:
		select {
		case err := <-w.done:
			return err
		default:
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.err != nil {
			return g.err
		}
		return fail(ErrNotConnected, "the %s was closed", g.what)
	case <-ctx.Done():
		g.mu.Lock()
		defer g.mu.Unlock()
		why := "gateway " + g.gateway + " did not confirm it"
		if g.stream == nil {
			why = "no gateway: " + g.reason
		}
		return fail(ErrOutcomeUnknown, "the request did not take effect in time (%s); the client repeats it until a gateway confirms it", why).by(ctx.Err())
	}
}

// catchUp asks for what is wanted and was not asked for yet. The lock is held.
func (g *gatewayConn) catchUp(st *gatewayStream) {
	waiters := g.waiters
	g.waiters = nil
	st.reconcile(g.wanted, waiters)
}

func (g *gatewayConn) run() {
	err := g.serveForEver()
	g.mu.Lock()
	if g.ctx.Err() == nil && err != nil {
		g.err = err
	} else {
		err = nil
	}
	why := err
	if why == nil {
		why = fail(ErrNotConnected, "the %s was closed", g.what)
	}
	for _, w := range g.waiters {
		w.done <- why
	}
	g.waiters = nil
	g.notify()
	g.mu.Unlock()
	close(g.over)
	if err != nil {
		g.announce(Closed, err.Error())
	}
}

func (g *gatewayConn) serveForEver() error {
	options := &g.client.options
	giveUp, served, failures := time.Now().Add(options.ConnectTimeout), false, 0
	for g.ctx.Err() == nil {
		address := g.choose(failures, "")
		g.answered = time.Time{}
		confirmed := false
		if address != "" {
			var err error
			if !pause(g.ctx, time.Until(g.rest[address])) {
				return nil
			}
			confirmed, err = g.serveGateway(address, served)
			if err != nil {
				return err
			}
			served = served || !g.answered.IsZero()
			if !g.answered.IsZero() && g.ctx.Err() == nil {
				g.announce(Reconnecting, g.reason)
			}
		} else {
			g.mu.Lock()
			g.reason = "the cluster has no gateway; start one"
			g.mu.Unlock()
		}
		g.client.directory.refresh()
		if !served && time.Now().After(giveUp) {
			return fail(ErrUnreachable, "no gateway accepted the %s within %s (%s)", g.what, options.ConnectTimeout, g.reason)
		}
		if failures++; confirmed && !g.answered.IsZero() && time.Since(g.answered) >= proven {
			failures = 1
		}
		pause(g.ctx, afterFailures(failures, options.Backoff, options.MaxBackoff))
	}
	return nil
}

// choose takes the client's own gateway, by rendezvous of its name; after failures the next ones in that order.
func (g *gatewayConn) choose(failures int, avoid string) string {
	order := slices.DeleteFunc(slices.Clone(g.client.directory.current().Gateways), func(each string) bool { return each == avoid })
	slices.SortFunc(order, func(a, b string) int {
		return strings.Compare(rank(g.name, a), rank(g.name, b))
	})
	g.mu.Lock()
	order = g.rest.usable(order)
	g.mu.Unlock()
	if len(order) == 0 {
		return ""
	}
	return order[failures%len(order)]
}

func rank(name, address string) string {
	hash := codec.Hash(name + "\x00" + address)
	text := make([]byte, 8)
	for at := range text {
		text[at] = byte(hash >> (56 - 8*at))
	}
	return string(text)
}

// serveGateway serves from one gateway, and from those it hands over to, until a connection is lost. confirmed: the gateway had
// confirmed everything. An error ends the connection for good.
func (g *gatewayConn) serveGateway(address string, reconnect bool) (confirmed bool, err error) {
	st := g.connect(address)
	g.mu.Lock()
	g.catchUp(st)
	g.mu.Unlock()
	why := g.greet(st)
	if why == nil {
		g.answered = time.Now()
		if reconnect {
			g.content.lost(g.reason)
		}
		g.mu.Lock()
		g.stream, g.gateway = st, address
		g.catchUp(st) // names that were asked for meanwhile
		g.mu.Unlock()
		g.announce(Connected, "")
		var successor *gatewayStream
		for {
			successor, why = g.serve(st)
			if successor == nil {
				break
			}
			g.end(st)
			st = successor
			g.mu.Lock()
			g.stream = st
			g.catchUp(st)
			g.mu.Unlock()
		}
	}
	g.mu.Lock()
	g.stream = nil
	g.mu.Unlock()
	g.end(st)
	g.mu.Lock()
	confirmed = st.settled() && !st.lacking
	g.reason = st.address + ": " + reasonOf(why)
	var ours *Error
	if errors.As(why, &ours) {
		g.reason = st.address + ": " + ours.Text
	}
	g.rest.refused(st.address, st.pushback)
	g.mu.Unlock()
	switch {
	case ours != nil && ours.finalRefusal:
		return confirmed, ours
	case isLogin(reasonOf(why)):
		return confirmed, fail(ErrNotAuthenticated, "%s", reasonOf(why)).by(why)
	case ours == nil && why != nil && isRefused(why):
		return confirmed, fail(ErrNotAllowed, "the gateway refused the %s (%s)", g.what, g.reason).by(why)
	}
	return confirmed, nil
}

// end closes a stream. The next stream answers the waiting callers; those it cannot answer fail now.
func (g *gatewayConn) end(st *gatewayStream) {
	st.close()
	g.mu.Lock()
	for _, w := range st.waiters {
		if w.lost != nil {
			w.done <- w.lost
		} else {
			g.waiters = append(g.waiters, w)
		}
	}
	st.waiters = nil
	g.mu.Unlock()
	g.content.ended(st)
}

// greet waits for the gateway's first reply, which stays to be taken.
func (g *gatewayConn) greet(st *gatewayStream) error {
	timer := time.NewTimer(g.client.options.ConnectTimeout)
	defer timer.Stop()
	select {
	case <-st.greeted:
		return nil
	case <-st.ended:
		return st.why
	case <-timer.C:
		return errors.New("no answer in time")
	case <-g.ctx.Done():
		return g.ctx.Err()
	}
}

// prepared is a gateway that is ready to take over, and the replies that it has sent meanwhile.
type prepared struct {
	stream *gatewayStream
	held   []*wire.SubscribeReply
}

// serve delivers what a gateway sends. It returns the stream to continue with, or nil and why this one ended.
func (g *gatewayConn) serve(st *gatewayStream) (*gatewayStream, error) {
	var next chan *prepared
	preparing, stop := context.WithCancel(g.ctx)
	over := false
	defer stop()
	defer g.content.overlap(false)
	finish := func() { // a prepared stream that nobody takes ends
		stop()
		if next != nil {
			if found := <-next; found != nil {
				g.end(found.stream)
			}
		}
	}
	for {
		g.mu.Lock()
		draining := st.draining
		g.mu.Unlock()
		if draining && next == nil {
			g.content.overlap(true)
			next = make(chan *prepared, 1)
			result := next
			g.client.tasks.Go(func() { result <- g.prepare(preparing, st.address) })
		}
		replies := st.replies
		if over {
			replies = nil
		}
		select {
		case reply, open := <-replies:
			if next == nil {
				if !open {
					return nil, st.why
				}
				if err := g.take(st, reply, false); err != nil {
					return nil, err
				}
				continue
			}
			// A gateway that is leaving: its end is no failure, and neither is a login that the successor replaced.
			if !open || reply.ErrorCode == "LOGIN_REPLACED" {
				over = true
				continue
			}
			if err := g.take(st, reply, false); err != nil {
				finish()
				return nil, err
			}
		case found := <-next:
			next = nil
			if found == nil {
				if over {
					return nil, st.why
				}
				g.mu.Lock()
				st.draining = false // no other gateway is there: stay until this one ends
				g.mu.Unlock()
				g.content.overlap(false)
				continue
			}
			missing := "the gateway was gone before another one had confirmed"
			if !over {
				missing = g.readRest(st)
			}
			g.mu.Lock()
			g.gateway = found.stream.address
			g.mu.Unlock()
			g.announce(Moved, "the previous gateway, "+st.address+", is draining")
			if missing != "" {
				g.content.lost(missing)
			}
			for _, reply := range found.held {
				if err := g.take(found.stream, reply, true); err != nil {
					g.end(found.stream)
					return nil, err
				}
			}
			return found.stream, nil
		case <-g.ctx.Done():
			finish()
			return nil, g.ctx.Err()
		}
	}
}

// readRest delivers what the old gateway still sends; replies of the new one are held, so that the order is kept. It returns why
// messages may be missing; empty: none are.
func (g *gatewayConn) readRest(st *gatewayStream) string {
	if g.linger == 0 || !g.readFor(st, g.linger, nil) {
		return ""
	}
	for range answers { // the first answer may overtake messages that wait beside it
		w := &waiter{lost: fail(ErrNotConnected, "the gateway was left"), done: make(chan error, 1)}
		g.mu.Lock()
		st.acknowledge(nil, w)
		g.mu.Unlock()
		if !g.readFor(st, answerFor, w.done) {
			return ""
		}
		if len(w.done) == 0 {
			return "the draining gateway " + st.address + " did not answer within " + answerFor.String()
		}
	}
	return ""
}

// readFor delivers what a gateway that is leaving sends, for a time, or until it has answered. false: it ended.
func (g *gatewayConn) readFor(st *gatewayStream, limit time.Duration, answered chan error) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for len(answered) == 0 {
		select {
		case reply, open := <-st.replies:
			if !open || reply.ErrorCode == "LOGIN_REPLACED" || g.take(st, reply, false) != nil {
				return false
			}
		case <-timer.C:
			return true
		case <-g.ctx.Done():
			return false
		}
	}
	return true
}

// prepare joins everything at another gateway while the old one still delivers.
func (g *gatewayConn) prepare(ctx context.Context, avoid string) *prepared {
	if !pause(ctx, time.Duration(rand.Int64N(int64(moveJitter)))) {
		return nil
	}
	g.client.directory.refresh()
	address := g.choose(0, avoid)
	if address == "" {
		return nil
	}
	st := g.connect(address)
	found := &prepared{stream: st}
	g.mu.Lock()
	st.reconcile(g.wanted, nil)
	g.mu.Unlock()
	timer := time.NewTimer(g.client.options.JoinTimeout)
	defer timer.Stop()
	for size := 0; ; {
		g.mu.Lock()
		settled := st.settled()
		g.mu.Unlock()
		if settled || size >= g.client.options.ReceiveBytes {
			return found
		}
		select {
		case reply, open := <-st.replies:
			if open && reply.ErrorCode == "" && !reply.Draining {
				g.mu.Lock()
				st.confirmed(reply.Request)
				g.mu.Unlock()
				found.held = append(found.held, reply)
				size += len(reply.Batch) + len(reply.Mail)
				continue
			}
		case <-timer.C:
		case <-ctx.Done():
		}
		g.end(st)
		return nil
	}
}

// take processes a reply. An error ends the stream; a final one the connection.
func (g *gatewayConn) take(st *gatewayStream, reply *wire.SubscribeReply, held bool) error {
	g.mu.Lock()
	if reply.Uin != 0 && reply.MaxNames > 0 {
		st.maxNames = min(int(reply.MaxNames), maxNames)
	}
	st.draining = st.draining || reply.Draining
	var err error
	if reply.ErrorCode != "" {
		err = g.refused(st, reply)
	} else if reply.Request != 0 {
		st.confirmed(reply.Request)
	}
	g.mu.Unlock()
	if err != nil {
		return err
	}
	return g.content.take(st, reply, held)
}

// refused takes a refusal: waiting callers get the error; otherwise an error of ours ends the connection, and any other one makes
// the client try another gateway. The lock is held.
func (g *gatewayConn) refused(st *gatewayStream, reply *wire.SubscribeReply) error {
	asked, told := st.refused(reply)
	if told {
		for room := range asked.rooms {
			delete(g.wanted.rooms, room)
		}
		for topic := range asked.topics {
			delete(g.wanted.topics, topic)
		}
		return nil
	}
	if reply.ErrorCode == "OVERLOADED" && len(asked.rooms)+len(asked.topics) > 0 {
		if !st.lacking {
			// Joins overload the gateway: reconnecting with all rooms would load this or another one more.
			st.lacking = true
			wait := askAgain
			if reply.RetryAfterMs > 0 {
				wait = min(time.Duration(reply.RetryAfterMs)*time.Millisecond, maxPushback)
			}
			g.client.tasks.Go(func() {
				if !pause(st.ctx, jittered(wait)) {
					return
				}
				g.mu.Lock()
				defer g.mu.Unlock()
				st.lacking = false
				if g.stream == st {
					g.catchUp(st)
				}
			})
		}
		return nil
	}
	found := refusal(reply.ErrorCode, "gateway "+st.address+" refused: "+reply.ErrorText, reply.RetryAfterMs)
	switch found.Kind {
	case ErrInvalidArgument, ErrLoginReplaced, ErrNotAuthenticated, ErrNotAllowed, ErrNotServed, ErrConfiguration:
		found.finalRefusal = true
	}
	return found
}

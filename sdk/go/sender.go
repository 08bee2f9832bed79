package pixiu

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	wire "pixiu/wire/v1"
)

const (
	maxWindow    = 64 << 20
	drainedPause = 5 * time.Second
	mailStall    = 30 * time.Second // above the proxies' own limit for a mail
)

// ticket is a message from its offer until it is resolved.
type ticket struct {
	record   []byte
	size     int
	key      uint64
	id       uint64
	first    bool // of lane 0
	level    wire.Level
	more     []uint64
	deadline time.Time
	attempts int
	inDoubt  bool // an earlier attempt was sent and not answered
	resolved bool
	err      *Error
	done     chan struct{}
	onDone   func(*ticket)
	msgIDs   []uint64
	copies   uint32
}

func newTicket(record []byte, key, id uint64, first bool) *ticket {
	return &ticket{record: record, size: len(record), key: key, id: id, first: first, done: make(chan struct{})}
}

type proxyState int

const (
	proxyIdle     proxyState = iota // usable, without a stream
	proxyOpen                       // usable, with a stream
	proxyDraining                   // its stream only finishes what is under way
	proxyDown                       // not usable until its back-off is over
)

// flight is a message under way on a stream, at a position.
type flight struct {
	*ticket
	refused bool // the proxy refused it unseen: it goes elsewhere
}

type proxy struct {
	address       string
	state         proxyState
	listed        bool
	stream        *sendStream
	first, normal []*ticket
	inFlight      []*flight // positions from base+1 on; nil: resolved
	base, sent    uint64
	bytes         int
	window        int
	batchBytes    int
	batchRecords  int
	batches       int
	heard         bool
	deaths        int
	progressAt    time.Time
	restUntil     time.Time
	unauthorized  bool
}

func (p *proxy) open() int {
	count := 0
	for _, each := range p.inFlight {
		if each != nil && !each.resolved {
			count++
		}
	}
	return count
}

func (p *proxy) busy() bool { return len(p.inFlight) > 0 || len(p.first) > 0 || len(p.normal) > 0 }

// takeBack puts what was sent on a stream that is over back into the queues. answered: none of it was taken.
func (p *proxy) takeBack(answered bool) {
	var first, normal []*ticket
	for _, each := range p.inFlight {
		if each == nil || each.resolved {
			continue
		}
		if !answered && !each.refused {
			each.inDoubt = true
		} else if !each.inDoubt {
			each.attempts = 0
		}
		if each.first {
			first = append(first, each.ticket)
		} else {
			normal = append(normal, each.ticket)
		}
	}
	p.first, p.normal = append(first, p.first...), append(normal, p.normal...)
	p.inFlight, p.bytes = nil, 0
}

type pin struct {
	proxy *proxy
	count int
}

// sender sends messages, or mail, with confirmation. One invariant keeps the order of a key: all of its unresolved messages are
// with one proxy, key % proxies unless that is down. A writer of mail keeps all of its messages with one proxy.
type sender struct {
	client  *Client
	writer  bool // of mail
	copy    uint32
	receipt func() bool
	timeout time.Duration
	stall   time.Duration
	longest time.Duration
	advice  string
	again   string // an outcome that resolves nothing
	tell    bool   // connection events

	mu         sync.Mutex
	proxies    map[string]*proxy
	listed     []*proxy
	pins       map[uint64]*pin
	current    *proxy // of a writer
	generation uint32
	worker     uint32
	stale      int
	restUntil  time.Time
	unresolved int
	bytes      int
	space      chan struct{} // closed and replaced when something is resolved
	lastReason string
	wake       chan struct{}
	closed     bool
	delivered  func(ids, gateways []uint64)
}

func newSender(client *Client, writer bool) *sender {
	options := &client.options
	s := &sender{
		client: client, writer: writer, timeout: options.PublishTimeout, stall: options.PublishTimeout / 2, longest: options.MaxBackoff,
		advice: "sending it again may deliver it twice", again: "DRAINING",
		proxies: map[string]*proxy{}, pins: map[uint64]*pin{}, space: make(chan struct{}), wake: make(chan struct{}, 1),
	}
	if writer {
		s.timeout, s.stall, s.longest = options.MailTimeout, mailStall, min(time.Second, options.MaxBackoff)
		s.advice, s.again = "Resend it, which uses the same ID, so that it is stored once", "OUTCOME_UNKNOWN"
	}
	s.mu.Lock()
	s.list(client.directory.current().Proxies)
	s.current = s.listed[rand.IntN(len(s.listed))]
	s.mu.Unlock()
	client.tasks.Go(s.run)
	return s
}

// offer queues a message, waiting for space.
func (s *sender) offer(ctx context.Context, t *ticket, timeout time.Duration) error {
	for {
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			return errClosed()
		}
		options := &s.client.options
		if s.unresolved == 0 || (s.unresolved < options.QueueRecords && s.bytes+t.size <= options.QueueBytes) {
			break
		}
		space := s.space
		s.mu.Unlock()
		select {
		case <-space:
		case <-ctx.Done():
			return fail(ErrNotSent, "the message was not sent in time: the client's queue was full").by(ctx.Err())
		}
	}
	defer s.mu.Unlock()
	if s.writer && s.current.state == proxyOpen && s.client.lease.number() != s.worker {
		s.leave(s.current, 0, false) // another holder of the old number may use it as a writer
	}
	t.deadline = time.Now().Add(timeout)
	s.unresolved++
	s.bytes += t.size
	p := s.route(t.key, 1)
	if !p.busy() {
		p.progressAt = time.Now()
	}
	if t.first {
		p.first = append(p.first, t)
	} else {
		p.normal = append(p.normal, t)
	}
	s.want(p)
	signalTo(s.wake)
	return nil
}

// wait waits for the outcome. A context that ends before the message left withdraws it.
func (s *sender) wait(ctx context.Context, t *ticket) error {
	select {
	case <-t.done:
	case <-ctx.Done():
		s.mu.Lock()
		if !t.resolved {
			if t.attempts == 0 {
				s.settle(t, fail(ErrNotSent, "the message was not sent in time: no proxy took it%s", s.because()).by(ctx.Err()))
			} else {
				s.settle(t, fail(ErrOutcomeUnknown, "no proxy confirmed the message in time%s: %s", s.because(), s.advice).by(ctx.Err()))
			}
		}
		s.mu.Unlock()
	}
	if t.err != nil {
		return t.err
	}
	return nil
}

func (s *sender) because() string {
	if s.lastReason == "" {
		return ""
	}
	return " (last failure: " + s.lastReason + ")"
}

// idle waits until everything is resolved.
func (s *sender) idle(ctx context.Context) error {
	for {
		s.mu.Lock()
		left, space := s.unresolved, s.space
		s.mu.Unlock()
		if left == 0 {
			return nil
		}
		select {
		case <-space:
		case <-ctx.Done():
			return fail(ErrOutcomeUnknown, "%d messages are still unresolved", left).by(ctx.Err())
		}
	}
}

func (s *sender) usable() []*proxy {
	var found []*proxy
	for _, each := range s.listed {
		if each.state == proxyIdle || each.state == proxyOpen {
			found = append(found, each)
		}
	}
	return found
}

func (s *sender) plainRoute(key uint64) *proxy {
	p := s.listed[key%uint64(len(s.listed))]
	if p.state == proxyIdle || p.state == proxyOpen {
		return p
	}
	if usable := s.usable(); len(usable) > 0 {
		return usable[key%uint64(len(usable))]
	}
	return p
}

func (s *sender) route(key uint64, count int) *proxy {
	if s.writer {
		if s.current.state == proxyDown {
			begin, usable := slices.Index(s.listed, s.current)+1, s.usable()
			for at := range s.listed {
				if each := s.listed[(begin+at)%len(s.listed)]; slices.Contains(usable, each) {
					s.current = each
					break
				}
			}
		}
		return s.current
	}
	found := s.pins[key]
	if found == nil {
		found = &pin{proxy: s.plainRoute(key)}
		s.pins[key] = found
	}
	found.count += count
	return found.proxy
}

func (s *sender) list(addresses []string) {
	var listed []*proxy
	for _, address := range addresses {
		p := s.proxies[address]
		if p == nil {
			p = &proxy{address: address}
			s.proxies[address] = p
		}
		if !slices.Contains(listed, p) {
			listed = append(listed, p)
		}
		p.listed = true
	}
	s.listed = listed
}

// setProxies takes the cluster's proxies, in the order of their registration.
func (s *sender) setProxies(addresses []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(addresses) == 0 || s.closed {
		return
	}
	before := s.listed
	s.list(addresses)
	for _, p := range before {
		if slices.Contains(s.listed, p) {
			continue
		}
		p.listed = false
		p.restUntil = time.Now().Add(drainedPause)
		switch p.state {
		case proxyOpen:
			p.state = proxyDraining
			s.finishDrain(p)
		case proxyIdle:
			p.state = proxyDown
			s.moveAll(p)
		}
	}
	s.rehome()
}

// want opens a stream if there is something to send and none is open, or wakes the one that is.
func (s *sender) want(p *proxy) {
	if p.state == proxyOpen {
		signalTo(p.stream.wake)
		return
	}
	if p.state != proxyIdle || time.Now().Before(s.restUntil) || s.closed {
		return
	}
	p.state, p.progressAt = proxyOpen, time.Now()
	p.base, p.sent, p.bytes, p.batches, p.heard = 0, 0, 0, 0, false
	p.window, p.batchBytes, p.batchRecords = s.client.options.WindowBytes, 0, 0
	ctx, cancel := context.WithCancel(s.client.ctx)
	p.stream = &sendStream{sender: s, proxy: p, ctx: ctx, cancel: cancel, wake: make(chan struct{}, 1), answered: make(chan struct{})}
	if s.writer {
		s.worker = s.client.lease.number()
		s.generation = nextGeneration(s.generation, time.Now(), uint32(1)<<min(s.stale, 20)-1)
		p.stream.worker, p.stream.generation = s.worker, s.generation
	}
	s.client.tasks.Go(p.stream.run)
}

const (
	generationEpoch = 1_577_836_800
	maxAhead        = 86_400 // seconds that a generation may be ahead of the clock
)

func nextGeneration(last uint32, now time.Time, jump uint32) uint32 {
	at := uint32(now.Unix() - generationEpoch)
	return max(last+1, min(last+1+jump, at+maxAhead), at, 1)
}

// nextBatch takes the next batch for a stream: lane 0 first, within the window.
func (s *sender) nextBatch(stream *sendStream) (batch []*ticket, position uint64, more bool) {
	p, options := stream.proxy, &s.client.options
	if p.stream != stream || p.state != proxyOpen {
		return nil, 0, false
	}
	underWay := p.open()
	longest, most := options.BatchBytes, options.BatchRecords
	if p.batchBytes > 0 {
		longest = min(longest, p.batchBytes)
	}
	if p.batchRecords > 0 {
		most = min(most, p.batchRecords)
	}
	size, records := 0, 0
	for _, queue := range []*[]*ticket{&p.first, &p.normal} {
		for len(*queue) > 0 {
			t := (*queue)[0]
			if t.resolved { // withdrawn
				*queue = (*queue)[1:]
				continue
			}
			grown := size + t.size
			records += 1 + len(t.more)
			if underWay+len(batch) >= options.WindowRecords ||
				(len(batch) > 0 && (grown > longest || records > most || t.level != batch[0].level)) ||
				(p.bytes+grown > p.window && (len(batch) > 0 || underWay > 0)) {
				more = p.bytes+grown <= p.window && underWay+len(batch) < options.WindowRecords
				goto cut
			}
			size = grown
			t.attempts++
			batch = append(batch, t)
			*queue = (*queue)[1:]
		}
	}
cut:
	if len(batch) == 0 {
		return nil, 0, false
	}
	if underWay == 0 {
		p.progressAt = time.Now()
	}
	for _, t := range batch {
		p.inFlight = append(p.inFlight, &flight{ticket: t})
	}
	position = p.sent + 1
	p.sent += uint64(len(batch))
	p.bytes += size
	p.batches++
	return batch, position, more
}

// outcome is what a proxy says of consecutive messages.
type outcome struct {
	position, count uint64
	err             *Error
	copies          uint32
	msgIDs          []uint64
}

// reply takes a proxy's answer: messages up to upTo are confirmed, but those with other outcomes.
func (s *sender) reply(stream *sendStream, upTo uint64, outcomes []outcome, draining bool) {
	p := stream.proxy
	if p.stream != stream {
		return
	}
	p.unauthorized = false
	last := upTo
	for _, each := range outcomes {
		last = max(last, each.position+each.count-1)
	}
	if last > p.sent {
		s.died(stream, "it answered for messages that it was never sent", nil, false)
		return
	}
	before := s.unresolved
	for _, each := range outcomes {
		for at := max(each.position, p.base+1); at < each.position+each.count; at++ {
			f := p.inFlight[at-p.base-1]
			if f == nil {
				continue
			}
			f.copies = each.copies
			if place := int(at - each.position); place < len(each.msgIDs) {
				f.msgIDs = each.msgIDs[place : place+1]
			}
			if each.err != nil && each.err.Code == s.again {
				if !s.writer {
					f.refused = true
				}
				continue
			}
			p.inFlight[at-p.base-1] = nil
			p.bytes -= f.size
			if !f.resolved {
				s.settle(f.ticket, s.answerOf(f.ticket, each.err))
			}
		}
	}
	for at := p.base + 1; at <= upTo; at++ {
		if f := p.inFlight[at-p.base-1]; f != nil && !f.refused {
			p.inFlight[at-p.base-1] = nil
			p.bytes -= f.size
			if !f.resolved {
				s.settle(f.ticket, nil)
			}
		}
	}
	gone := 0
	refused := false
	for gone < len(p.inFlight) && p.inFlight[gone] == nil {
		gone++
	}
	p.inFlight, p.base = p.inFlight[gone:], p.base+uint64(gone)
	for _, each := range p.inFlight {
		refused = refused || (each != nil && each.refused)
	}
	p.progressAt, p.heard = time.Now(), true
	if s.unresolved < before {
		p.deaths, s.stale = 0, 0
	}
	if (draining || refused) && p.state == proxyOpen {
		p.state = proxyDraining
		s.client.directory.refresh()
	}
	if p.state == proxyDraining {
		s.finishDrain(p)
	} else {
		signalTo(stream.wake)
	}
}

// answerOf is the failure of a message that a proxy answered.
func (s *sender) answerOf(t *ticket, why *Error) *Error {
	if why == nil {
		return nil
	}
	looked := why.Code == "ID_REUSED" || why.Code == "INBOX_FULL" || why.Code == "TOO_OLD"
	if t.inDoubt && !looked {
		if found := inDoubt(why, s.advice); found != why {
			return found
		}
	} else if !t.inDoubt && !s.writer && why.Code == "UNAVAILABLE" {
		why = fail(ErrNotSent, "%s", why.Text)
	}
	t.inDoubt, t.attempts = false, 0
	return why
}

func (s *sender) settle(t *ticket, err *Error) {
	t.resolved, t.err = true, err
	s.unresolved--
	s.bytes -= t.size
	if !s.writer {
		if found := s.pins[t.key]; found != nil {
			if found.count--; found.count == 0 {
				delete(s.pins, t.key)
			}
		}
	}
	if err == nil {
		t.record = nil
	}
	close(t.done)
	close(s.space)
	s.space = make(chan struct{})
	if t.onDone != nil {
		s.client.tasks.Go(func() { t.onDone(t) })
	}
}

// died takes the end of a stream. end: the reason that the proxy gave for a writer's stream. login: it refused the login.
func (s *sender) died(stream *sendStream, reason string, end *Error, login bool) {
	p := stream.proxy
	if p.stream != stream {
		return
	}
	s.lastReason = p.address + ": " + reason
	p.deaths++
	rest := afterFailures(p.deaths, s.client.options.Backoff, s.longest)
	hopeless := false
	if end != nil {
		s.stale++
		if end.Code != "STALE_WRITER" {
			s.stale = 0
		}
		s.restUntil = time.Now().Add(end.RetryAfter)
		switch end.Code {
		case "INVALID_ARGUMENT", "MALFORMED", "NOT_ALLOWED", "NOT_SERVED":
			hopeless = true
		case "DRAINING", "OVERLOADED":
		default:
			if p.deaths == 1 {
				rest = 0
			}
		}
	}
	answered := hopeless && !p.heard && (p.batches <= 1 || end.Code == "NOT_SERVED")
	p.takeBack(answered || login)
	if hopeless {
		s.giveUp(p, end)
	}
	s.leave(p, rest, true)
	s.client.directory.refresh()
	if login {
		p.unauthorized = true
		for _, each := range s.listed {
			if !each.unauthorized {
				return
			}
		}
		for _, each := range s.proxies {
			s.giveUp(each, fail(ErrNotAuthenticated, "%s", reason))
		}
	}
}

func (s *sender) giveUp(p *proxy, why *Error) {
	for _, queue := range []*[]*ticket{&p.first, &p.normal} {
		for _, t := range *queue {
			if t.resolved {
				continue
			}
			if t.inDoubt {
				s.settle(t, inDoubt(why, s.advice))
			} else {
				s.settle(t, why)
			}
		}
		*queue = nil
	}
}

// leave ends a proxy's stream; what waits for it goes to those that now serve it.
func (s *sender) leave(p *proxy, rest time.Duration, taken bool) {
	if !taken {
		p.takeBack(false)
	}
	if p.stream != nil {
		p.stream.cancel()
		p.stream = nil
	}
	p.state, p.restUntil = proxyDown, time.Now().Add(rest)
	if rest == 0 && p.listed {
		p.state = proxyIdle
	}
	s.moveAll(p)
}

// moveAll moves everything that a proxy has to those that now serve its keys, before their own messages of the same lane.
func (s *sender) moveAll(source *proxy) {
	first, normal := source.first, source.normal
	source.first, source.normal = nil, nil
	targets := map[*proxy]*[2][]*ticket{}
	moved := map[uint64]*proxy{}
	for lane, queue := range [][]*ticket{first, normal} {
		for _, t := range queue {
			if t.resolved {
				continue
			}
			target := moved[t.key]
			if target == nil {
				if s.writer {
					target = s.route(0, 0)
				} else {
					target = s.plainRoute(t.key)
					s.pins[t.key].proxy = target
				}
				moved[t.key] = target
			}
			if targets[target] == nil {
				targets[target] = &[2][]*ticket{}
			}
			targets[target][lane] = append(targets[target][lane], t)
		}
	}
	for target, lanes := range targets {
		if !target.busy() {
			target.progressAt = time.Now()
		}
		target.first, target.normal = append(lanes[0], target.first...), append(lanes[1], target.normal...)
		s.want(target)
	}
	signalTo(s.wake)
}

func (s *sender) rehome() {
	if len(s.usable()) == 0 {
		return
	}
	for _, p := range s.proxies {
		switch {
		case p.state == proxyDown && p.busy():
			s.moveAll(p)
		case p.state == proxyIdle && p.busy():
			s.want(p)
		}
	}
}

func (s *sender) finishDrain(p *proxy) {
	for _, each := range p.inFlight {
		if each != nil && !each.resolved && !each.refused {
			return
		}
	}
	s.leave(p, drainedPause, false)
	if s.writer {
		s.client.directory.refresh()
	}
}

// run ends back-offs, messages whose time is over, and silent streams.
func (s *sender) run() {
	for {
		s.mu.Lock()
		if s.client.ctx.Err() != nil {
			s.mu.Unlock()
			return
		}
		wait := s.tick(time.Now())
		s.mu.Unlock()
		timer := time.NewTimer(wait)
		select {
		case <-s.wake:
			timer.Stop()
			pause(s.client.ctx, 10*time.Millisecond) // many messages wake it once
		case <-timer.C:
		case <-s.client.ctx.Done():
			timer.Stop()
			return
		}
	}
}

func (s *sender) tick(now time.Time) time.Duration {
	next := now.Add(time.Hour)
	earlier := func(at time.Time) {
		if at.Before(next) {
			next = at
		}
	}
	for _, p := range s.proxies {
		for _, each := range p.inFlight {
			if each != nil && !each.resolved {
				s.expire(each.ticket, now, earlier)
			}
		}
		for _, queue := range [][]*ticket{p.first, p.normal} {
			for _, t := range queue {
				if !t.resolved {
					s.expire(t, now, earlier)
				}
			}
		}
		owes := p.stream != nil && (p.open() > 0 || len(p.first)+len(p.normal) > 0)
		if owes && now.Sub(p.progressAt) >= s.stall {
			s.died(p.stream, "no answer for "+s.stall.String(), nil, false)
		} else if owes {
			earlier(p.progressAt.Add(s.stall))
		} else if p.state == proxyDraining {
			s.finishDrain(p)
		}
		if p.state == proxyDown && !now.Before(p.restUntil) {
			if p.listed {
				p.state = proxyIdle
			} else if !p.busy() {
				delete(s.proxies, p.address)
			} else {
				p.restUntil = now.Add(s.client.options.MaxBackoff)
			}
		}
		if p.state == proxyDown {
			earlier(p.restUntil)
		} else if p.state == proxyIdle && p.busy() && now.Before(s.restUntil) {
			earlier(s.restUntil)
		}
	}
	s.rehome()
	return max(time.Until(next), 10*time.Millisecond)
}

func (s *sender) expire(t *ticket, now time.Time, earlier func(time.Time)) {
	switch {
	case now.Before(t.deadline):
		earlier(t.deadline)
	case t.attempts > 0:
		s.settle(t, fail(ErrOutcomeUnknown, "no proxy confirmed the message in time%s: %s", s.because(), s.advice))
	default:
		s.settle(t, fail(ErrNotSent, "the message was not sent in time: no proxy took it%s", s.because()))
	}
}

// close fails what is unresolved and ends the streams, giving proxies a moment to take their end.
func (s *sender) close() {
	s.mu.Lock()
	s.closed = true
	for _, p := range s.proxies {
		if p.stream != nil && !p.busy() {
			p.stream.finish()
		}
		p.takeBack(false)
		p.stream = nil // an answer that comes now is for messages that are settled
		for _, t := range append(p.first, p.normal...) {
			if !t.resolved && t.attempts > 0 {
				s.settle(t, fail(ErrOutcomeUnknown, "the client was closed before a proxy confirmed it: its outcome is unknown"))
			} else if !t.resolved {
				s.settle(t, fail(ErrNotSent, "the client was closed before a proxy confirmed it; it was not sent"))
			}
		}
		p.first, p.normal = nil, nil
	}
	s.mu.Unlock()
}

// isLogin: the proxy refused the login.
func isLogin(reason string) bool { return strings.HasPrefix(reason, "Unauthenticated") }

package pixiu

import (
	"context"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"pixiu/internal/codec"
	wire "pixiu/wire/v1"
)

const (
	usualCredit  = 64
	maxCredit    = 10_000
	maxReports   = 100 // of a stream that are not answered
	maxRejected  = 500 // messages of a report, because each has a text
	reportAgain  = 200 * time.Millisecond
	rejoinSoon   = 2 * time.Second
	rejoinEvery  = 60 * time.Second // a seek may have gone back into sealed parts of a group that was left
	touchShare   = 3                // messages that wait here are kept in this share of the channel's time-out
	usualTimeout = 60 * time.Second
	maxDelay     = 24 * time.Hour
)

// joining is what member options describe.
type joining struct {
	credit   int
	tag      string
	filter   string
	loadTest LoadTest
	create   ChannelInfo
	created  bool
}

// A MemberOption is an option of a channel's member.
type MemberOption func(*joining)

// Credit bounds the messages that the member has and has not reported, 1 to 10,000; default 64.
func Credit(messages int) MemberOption { return func(j *joining) { j.credit = messages } }

// WithTag gets messages with this tag.
func WithTag(tag string) MemberOption { return func(j *joining) { j.tag = tag } }

// ChannelLoadTests says what of load tests comes; what does not counts as acknowledged.
func ChannelLoadTests(which LoadTest) MemberOption { return func(j *joining) { j.loadTest = which } }

// CreateChannel says how the channel is made if it is missing; its name is ignored. Without it a missing channel gets everything
// that is kept, in any order.
func CreateChannel(channel ChannelInfo) MemberOption {
	return func(j *joining) { j.create = channel }
}

// MustExist fails with ErrUnknownTopic if the channel is missing.
func MustExist() MemberOption { return func(j *joining) { j.created = true } }

// A ChannelMessage is the member's until it is acknowledged, refused or rejected, or the channel's time-out is over.
type ChannelMessage struct {
	TopicMessage
	Attempts int // deliveries, with this one

	member *ChannelMember
	call   *memberCall
	answer chan bool // of its report
}

// Ack acknowledges the message and waits for the answer. true: it is committed, and the message never comes again. false: it is no
// longer the member's, because its time was over, or its leader changed. It comes again, to whomever, unless another member has dealt
// with it, or the leader ended between the commit and its answer. So false is no reason to undo what was done.
func (m *ChannelMessage) Ack(ctx context.Context) (bool, error) {
	return m.member.report(ctx, m, report{}, true)
}

// AckSoon is Ack without waiting; ChannelMember.Flush waits for all of them.
func (m *ChannelMessage) AckSoon() error {
	_, err := m.member.report(context.Background(), m, report{}, false)
	return err
}

// Nack gives the message back: it comes again after a delay, up to a day, until its attempts are used up.
func (m *ChannelMessage) Nack(ctx context.Context, delay time.Duration) (bool, error) {
	if delay < 0 || delay > maxDelay {
		return false, fail(ErrInvalidArgument, "a delay is from 0 to %s, not %s", maxDelay, delay)
	}
	return m.member.report(ctx, m, report{refuse: true, delayMs: uint64(delay / time.Millisecond)}, true)
}

// Reject puts the message to the channel's dead letters at once. reason: a sentence of at most 256 bytes.
func (m *ChannelMessage) Reject(ctx context.Context, reason string) (bool, error) {
	if reason == "" || len(reason) > 256 {
		return false, fail(ErrInvalidArgument, "a reason has 1 to 256 bytes")
	}
	return m.member.report(ctx, m, report{refuse: true, reason: reason}, true)
}

// Touch asks for the channel's whole time-out again.
func (m *ChannelMessage) Touch() {
	m.member.mu.Lock()
	defer m.member.mu.Unlock()
	m.member.touch(m)
}

// report is what a member says of a message: done, or refused.
type report struct {
	refuse  bool
	delayMs uint64
	reason  string
}

type place struct {
	part   uint32
	offset uint64
}

type reported struct {
	message *ChannelMessage
	report  report
}

// memberCall is a stream to the leader of a group.
type memberCall struct {
	member    *ChannelMember
	group     uint32
	address   string
	ctx       context.Context
	cancel    context.CancelFunc
	wake      chan struct{}
	answered  chan struct{}
	heard     bool
	credit    int
	held      map[place]*ChannelMessage
	due       map[uint32]map[uint64]reported // by part
	touched   map[uint32]map[uint64]bool
	sent      map[uint64]map[uint64]reported // by request
	restUntil time.Time
}

type memberGroup struct {
	link leaderLink
	call *memberCall
}

// A ChannelMember takes messages of a channel: every channel gets everything, and its members share the work. One goroutine at a
// time takes messages; any may report them.
type ChannelMember struct {
	client  *Client
	topic   *Topic
	channel string
	options joining
	user    *follower
	ctx     context.Context
	cancel  context.CancelFunc
	tasks   sync.WaitGroup

	mu        sync.Mutex
	current   *topicMap
	groups    map[uint32]*memberGroup
	finished  map[uint32]bool
	rejoinAt  time.Time
	requests  uint64
	waiting   []*ChannelMessage
	took      bool
	refusedAt time.Time
	changed   chan struct{}
	wake      chan struct{}
	err       error
	closed    bool
}

// Channel becomes a member of a channel of the topic, which is created if it is missing.
func (t *Topic) Channel(ctx context.Context, channel string, options ...MemberOption) (*ChannelMember, error) {
	j := joining{credit: usualCredit}
	for _, each := range options {
		each(&j)
	}
	if err := checkName(t.Name, "topic"); err != nil {
		return nil, err
	}
	if err := checkName(channel, "channel"); err != nil {
		return nil, err
	}
	if j.credit < 1 || j.credit > maxCredit {
		return nil, fail(ErrInvalidArgument, "credit is from 1 to %d, not %d", maxCredit, j.credit)
	}
	c := t.client
	m := &ChannelMember{
		client: c, topic: t, channel: channel, options: j, groups: map[uint32]*memberGroup{}, finished: map[uint32]bool{},
		changed: make(chan struct{}), wake: make(chan struct{}, 1),
	}
	found, _, err := c.topicMaps.describe(ctx, t.Name, 0)
	if err != nil {
		return nil, err
	}
	version := found.version
	if found.channels[channel] == nil {
		if j.created {
			return nil, fail(ErrUnknownTopic, "the topic %s has no channel %q: px.Topics().SetChannel makes it", t.Name, channel)
		}
		j.create.Name = channel
		made, err := c.Topics().SetChannel(ctx, t.Name, j.create)
		if err != nil {
			return nil, err
		}
		version = made.Version
	}
	m.user = &follower{onTopic: m.onTopic, onEnd: func(why *Error) { m.fail(why) }}
	if found, err = c.topicMaps.follow(ctx, t.Name, version, m.user); err != nil {
		return nil, err
	}
	m.ctx, m.cancel = context.WithCancel(c.ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := c.add(m); err != nil {
		c.topicMaps.leave(t.Name, m.user)
		m.cancel()
		return nil, err
	}
	m.setTopic(found)
	m.tasks.Go(m.run)
	m.tasks.Go(m.keep)
	return m, nil
}

func (m *ChannelMember) notify() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// Next waits for the next message. After Close it fails with ErrNotConnected; after a refusal with that.
func (m *ChannelMember) Next(ctx context.Context) (*ChannelMessage, error) {
	for {
		m.mu.Lock()
		for len(m.waiting) > 0 && !m.closed {
			message := m.waiting[0]
			m.waiting = m.waiting[1:]
			m.took = true
			if m.holds(message) {
				m.mu.Unlock()
				return message, nil
			}
		}
		err, closed, changed := m.err, m.closed, m.changed
		m.mu.Unlock()
		switch {
		case closed:
			return nil, fail(ErrNotConnected, "the member is closed")
		case err != nil:
			return nil, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fail(ErrUnavailable, "no message came in time").by(ctx.Err())
		}
	}
}

// All iterates over messages until the member is closed, which ends it, or fails, which is its last value.
func (m *ChannelMember) All(ctx context.Context) iter.Seq2[*ChannelMessage, error] {
	return func(yield func(*ChannelMessage, error) bool) {
		for {
			message, err := m.Next(ctx)
			m.mu.Lock()
			closed := m.closed
			m.mu.Unlock()
			if err != nil && closed {
				return
			}
			if !yield(message, err) || err != nil {
				return
			}
		}
	}
}

// Run calls a handler with each message. It is acknowledged when the handler has returned nil; otherwise it comes again after a
// back-off, until its attempts are used up. Run ends when the member is closed (nil), or fails.
func (m *ChannelMember) Run(ctx context.Context, handler func(*ChannelMessage) error) error {
	for message, err := range m.All(ctx) {
		if err != nil {
			return err
		}
		if handler(message) == nil {
			err = message.AckSoon()
		} else {
			wait := afterFailures(message.Attempts, m.client.options.Backoff, m.client.options.MaxBackoff)
			_, err = m.report(ctx, message, report{refuse: true, delayMs: uint64(wait / time.Millisecond)}, false)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Flush waits until everything that was reported is answered.
func (m *ChannelMember) Flush(ctx context.Context) error {
	for {
		m.mu.Lock()
		left, err, closed, changed := 0, m.err, m.closed, m.changed
		for _, group := range m.groups {
			if group.call != nil {
				left += len(group.call.due) + len(group.call.sent)
			}
		}
		m.mu.Unlock()
		if err != nil || closed || left == 0 {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fail(ErrOutcomeUnknown, "no leader answered all reports in time").by(ctx.Err())
		}
	}
}

// Close sends what was reported (at most a second) and leaves the channel: messages that are not reported go to other members.
func (m *ChannelMember) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
	err := m.Flush(ctx)
	cancel()
	m.mu.Lock()
	m.closed = true
	for _, group := range m.groups {
		m.void(group)
	}
	m.notify()
	m.mu.Unlock()
	m.client.topicMaps.leave(m.topic.Name, m.user)
	m.cancel()
	m.tasks.Wait()
	m.client.forget(m)
	return err
}

func (m *ChannelMember) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err == nil {
		m.err = err
	}
	for _, group := range m.groups {
		m.void(group)
	}
	m.notify()
}

// holds: the message is still this member's, and not reported.
func (m *ChannelMember) holds(message *ChannelMessage) bool {
	return message.call.held[place{message.Part, message.Offset}] == message
}

func (m *ChannelMember) report(ctx context.Context, message *ChannelMessage, how report, wait bool) (bool, error) {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return false, fail(ErrNotConnected, "the member is closed: the message is not acknowledged, and comes again")
	}
	if !m.holds(message) {
		m.mu.Unlock()
		return false, nil
	}
	call := message.call
	delete(call.held, place{message.Part, message.Offset})
	delete(call.touched[message.Part], message.Offset)
	if call.due[message.Part] == nil {
		call.due[message.Part] = map[uint64]reported{}
	}
	call.due[message.Part][message.Offset] = reported{message, how}
	signalTo(call.wake)
	m.mu.Unlock()
	if !wait {
		return true, nil
	}
	select {
	case counts := <-message.answer:
		return counts, nil
	case <-ctx.Done():
		return false, fail(ErrOutcomeUnknown, "no leader answered the report in time").by(ctx.Err())
	}
}

func (m *ChannelMember) touch(message *ChannelMessage) {
	if !m.closed && m.holds(message) {
		call := message.call
		if call.touched[message.Part] == nil {
			call.touched[message.Part] = map[uint64]bool{}
		}
		call.touched[message.Part][message.Offset] = true
		signalTo(call.wake)
	}
}

// keep keeps messages that wait here while the application takes others; one that takes nothing loses them.
func (m *ChannelMember) keep() {
	for {
		m.mu.Lock()
		timeout := usualTimeout
		if channel := m.current.channels[m.channel]; channel != nil && channel.TimeoutMs > 0 {
			timeout = time.Duration(channel.TimeoutMs) * time.Millisecond
		}
		m.mu.Unlock()
		if !pause(m.ctx, timeout/touchShare) {
			return
		}
		m.mu.Lock()
		if m.took {
			for _, message := range m.waiting {
				m.touch(message)
			}
		}
		m.took = false
		m.mu.Unlock()
	}
}

func (m *ChannelMember) onTopic(found *topicMap) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.current == nil || m.closed:
	case found.deleted || found.id != m.current.id:
		if m.err == nil {
			m.err = errGone(m.topic.Name)
		}
		m.notify()
	case found.version >= m.current.version:
		m.setTopic(found)
	}
}

// setTopic joins groups that hold new parts, and leaves those that hold none any more.
func (m *ChannelMember) setTopic(found *topicMap) {
	m.current = found
	wanted := map[uint32]bool{}
	for number, part := range found.parts {
		if !m.finished[number] {
			wanted[part.Group] = true
		}
	}
	for number, group := range m.groups {
		if wanted[number] || (group.call != nil && len(group.call.held)+len(group.call.due)+len(group.call.sent) > 0) {
			continue
		}
		m.void(group)
		delete(m.groups, number)
		m.rejoinWithin(time.Duration(float64(rejoinEvery) * (0.75 + 0.5*rand.Float64())))
	}
	for number := range wanted {
		if m.groups[number] == nil {
			m.groups[number] = &memberGroup{}
		}
		m.groups[number].link.set(found.groups[number])
	}
	for _, group := range m.groups {
		if group.call != nil {
			signalTo(group.call.wake) // the credit is shared anew
		}
	}
	signalTo(m.wake)
}

func (m *ChannelMember) rejoinWithin(wait time.Duration) {
	if at := time.Now().Add(wait); m.rejoinAt.IsZero() || at.Before(m.rejoinAt) {
		m.rejoinAt = at
	}
}

// void forgets what a stream delivered: all of it that is not committed comes again.
func (m *ChannelMember) void(group *memberGroup) {
	call := group.call
	if call == nil {
		return
	}
	group.call = nil
	call.cancel()
	for _, part := range call.due {
		for _, each := range part {
			each.message.answer <- false
		}
	}
	for _, request := range call.sent {
		for _, each := range request {
			each.message.answer <- false
		}
	}
	call.held, call.due, call.sent = map[place]*ChannelMessage{}, map[uint32]map[uint64]reported{}, map[uint64]map[uint64]reported{}
	m.notify()
}

// run opens streams when their back-off is over, and joins groups again that were left.
func (m *ChannelMember) run() {
	for m.ctx.Err() == nil {
		m.mu.Lock()
		now, next := time.Now(), time.Now().Add(time.Hour)
		if !m.rejoinAt.IsZero() && now.After(m.rejoinAt) {
			m.rejoinAt = time.Time{}
			for number := range m.finished {
				part, kept := m.current.parts[number]
				if !kept || m.groups[part.Group] == nil {
					delete(m.finished, number)
				}
			}
			m.setTopic(m.current)
		}
		if !m.rejoinAt.IsZero() && m.rejoinAt.Before(next) {
			next = m.rejoinAt
		}
		for number, group := range m.groups {
			if group.call != nil || m.err != nil || m.closed {
				continue
			}
			if now.Before(group.link.restUntil) {
				next = slices.MinFunc([]time.Time{next, group.link.restUntil}, time.Time.Compare)
				continue
			}
			address := group.link.address()
			if address == "" {
				group.link.failed(&m.client.options, m.client.options.MaxBackoff, "", 0)
				m.client.topicMaps.refresh(m.topic.Name, false)
				next = slices.MinFunc([]time.Time{next, group.link.restUntil}, time.Time.Compare)
				continue
			}
			call := &memberCall{
				member: m, group: number, address: address, wake: make(chan struct{}, 1), answered: make(chan struct{}), credit: m.share(),
				held: map[place]*ChannelMessage{}, due: map[uint32]map[uint64]reported{}, touched: map[uint32]map[uint64]bool{},
				sent: map[uint64]map[uint64]reported{},
			}
			call.ctx, call.cancel = context.WithCancel(m.ctx)
			group.call = call
			m.tasks.Go(call.run)
		}
		m.mu.Unlock()
		timer := time.NewTimer(time.Until(next))
		select {
		case <-m.wake:
		case <-timer.C:
		case <-m.ctx.Done():
		}
		timer.Stop()
	}
}

func (m *ChannelMember) share() int {
	return max(1, (m.options.credit+len(m.groups)-1)/max(1, len(m.groups)))
}

func (c *memberCall) run() {
	m := c.member
	defer c.cancel()
	connection, ctx, release, err := m.client.channels.acquire(c.ctx, c.address)
	if err != nil {
		c.over("", 0)
		return
	}
	defer release()
	stream, err := wire.NewTopicLogClient(connection).Consume(ctx)
	if err != nil {
		c.over("", 0)
		return
	}
	hello := &wire.ConsumeHello{
		Topic: m.topic.Name, Channel: m.channel, Member: m.client.name, Credit: uint32(c.credit), Tag: m.options.tag,
		LoadTest: wire.LoadTest(m.options.loadTest), Filter: m.options.filter,
	}
	_ = stream.Send(&wire.ConsumeRequest{Hello: hello}) // the reader hears why not
	m.tasks.Go(func() { c.write(stream) })
	for {
		reply, err := stream.Recv()
		if err != nil {
			if !c.heard && isRefused(err) && c.ctx.Err() == nil {
				m.fail(callError(err, m.topic.Name, false))
				return
			}
			c.over("", 0)
			return
		}
		if !c.take(reply) {
			return
		}
	}
}

func (c *memberCall) over(leader string, after time.Duration) {
	m := c.member
	m.mu.Lock()
	defer m.mu.Unlock()
	group := m.groups[c.group]
	if group == nil || group.call != c {
		return
	}
	m.void(group)
	group.link.failed(&m.client.options, m.client.options.MaxBackoff, leader, after)
	if leader == "" {
		m.client.topicMaps.refresh(m.topic.Name, false)
	}
	signalTo(m.wake)
}

func (c *memberCall) take(reply *wire.ConsumeReply) bool {
	m := c.member
	m.mu.Lock()
	group := m.groups[c.group]
	if group == nil || group.call != c {
		m.mu.Unlock()
		return false
	}
	if end := reply.End; end != nil {
		why := refused(end, m.topic.Name)
		if m.refusedAt.IsZero() {
			m.refusedAt = time.Now()
		}
		patience := m.client.options.JoinTimeout // a group may learn of a new channel or part a moment later than the client
		final := false
		switch why.Kind {
		case ErrInvalidArgument, ErrNotAllowed:
			final, patience = true, 0
		case ErrNotAuthenticated, ErrNotServed, ErrLimit:
			final = true
		}
		final = final && time.Since(m.refusedAt) >= patience
		m.mu.Unlock()
		if final {
			m.fail(why)
		} else {
			c.over(why.leader, why.RetryAfter)
		}
		return false
	}
	defer m.mu.Unlock()
	if !c.heard {
		c.heard = true
		m.refusedAt = time.Time{}
		group.link.answered()
		close(c.answered)
	}
	for _, delivery := range reply.Deliveries {
		c.delivered(delivery)
	}
	for _, result := range reply.Results {
		c.result(result)
	}
	if len(reply.FinishedParts) > 0 {
		newer := false
		for _, number := range reply.FinishedParts {
			m.finished[number] = true
			part, kept := m.current.parts[number]
			newer = newer || (kept && !part.Sealed)
		}
		if newer { // the parts that follow them may be in the same group: they are not known yet
			m.client.topicMaps.refresh(m.topic.Name, true)
		} else {
			m.setTopic(m.current)
			m.client.topicMaps.refresh(m.topic.Name, false)
		}
	}
	if reply.Rejoin {
		m.rejoinWithin(time.Duration(rand.Int64N(int64(rejoinSoon))))
		signalTo(m.wake)
	}
	signalTo(c.wake)
	return true
}

func (c *memberCall) delivered(found *wire.Delivery) {
	m := c.member
	spans, err := codec.Spans(found.Index, found.Data)
	if err != nil {
		return // it is not reported, and comes again
	}
	delete(m.finished, found.Part) // a seek went back
	for at, span := range spans {
		offset := found.Base + uint64(at)
		message := &ChannelMessage{member: m, call: c, Attempts: 1, answer: make(chan bool, 1)}
		if len(found.Attempts) == len(spans) {
			message.Attempts = int(found.Attempts[at])
		}
		read, err := topicMessage(m.topic.Name, found.Part, offset, int64(found.TimeUs), found.Sender, span)
		if err != nil {
			continue
		}
		message.TopicMessage = *read
		c.held[place{found.Part, offset}] = message
		m.waiting = append(m.waiting, message)
	}
	m.notify()
}

func (c *memberCall) result(result *wire.ReportResult) {
	found, known := c.sent[result.Request]
	if !known {
		return
	}
	delete(c.sent, result.Request)
	if why := result.Refusal; why != nil {
		switch why.Code {
		case "OUTCOME_UNKNOWN", "OVERLOADED", "TOO_FEW_IN_SYNC", "UNAVAILABLE": // it is made again
			if c.due[result.Part] == nil {
				c.due[result.Part] = map[uint64]reported{}
			}
			maps.Copy(c.due[result.Part], found)
			c.restUntil = time.Now().Add(max(reportAgain, time.Duration(why.RetryAfterMs)*time.Millisecond))
			return
		}
	}
	for offset, each := range found {
		counts := slices.Contains(result.Refused, offset)
		for at := 0; at+1 < len(result.Acknowledged) && !each.report.refuse; at += 2 {
			counts = counts || (result.Acknowledged[at] <= offset && offset < result.Acknowledged[at+1])
		}
		each.message.answer <- counts
	}
	c.member.notify()
}

// next is what to report now; wait: how long until there is more to say.
func (c *memberCall) next() (request *wire.ConsumeRequest, wait time.Duration) {
	m := c.member
	request = &wire.ConsumeRequest{}
	if share := m.share(); share != c.credit {
		c.credit = share
		request.Credit = uint32(share)
	}
	if rest := time.Until(c.restUntil); rest > 0 {
		wait = rest
	} else {
		for part := range c.due {
			if len(c.sent) < maxReports {
				request.Reports = append(request.Reports, c.reportOf(part))
			}
		}
		for part, offsets := range c.touched {
			if len(offsets) > 0 {
				m.requests++
				request.Reports = append(request.Reports, &wire.MessageReport{
					Request: m.requests, Part: part, Touched: slices.Sorted(maps.Keys(offsets)),
				})
			}
			delete(c.touched, part)
		}
	}
	if request.Credit == 0 && len(request.Reports) == 0 {
		return nil, wait
	}
	return request, 0
}

func (c *memberCall) reportOf(part uint32) *wire.MessageReport {
	c.member.requests++
	found := &wire.MessageReport{Request: c.member.requests, Part: part}
	sent := map[uint64]reported{}
	for _, offset := range slices.Sorted(maps.Keys(c.due[part])) {
		each := c.due[part][offset]
		switch last := len(found.Acknowledged) - 1; {
		case each.report.reason != "" && len(found.Rejected) >= maxRejected:
			continue
		case each.report.reason != "":
			found.Rejected = append(found.Rejected, &wire.RejectedMessage{Offset: offset, Reason: each.report.reason})
		case each.report.refuse:
			found.Refused = append(found.Refused, offset, each.report.delayMs)
		case last > 0 && found.Acknowledged[last] == offset:
			found.Acknowledged[last]++
		default:
			found.Acknowledged = append(found.Acknowledged, offset, offset+1)
		}
		sent[offset] = each
		delete(c.due[part], offset)
	}
	if len(c.due[part]) == 0 {
		delete(c.due, part)
	}
	c.sent[found.Request] = sent
	return found
}

func (c *memberCall) write(stream grpc.BidiStreamingClient[wire.ConsumeRequest, wire.ConsumeReply]) {
	select {
	case <-c.answered:
	case <-c.ctx.Done():
		return
	}
	for {
		c.member.mu.Lock()
		request, wait := c.next()
		c.member.mu.Unlock()
		if request != nil {
			if stream.Send(request) != nil {
				return // the reader hears why
			}
			continue
		}
		if wait == 0 {
			wait = time.Hour
		}
		timer := time.NewTimer(wait)
		select {
		case <-c.wake:
		case <-timer.C:
		case <-c.ctx.Done():
		}
		timer.Stop()
		if c.ctx.Err() != nil {
			return
		}
	}
}

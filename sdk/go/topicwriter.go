package pixiu

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"pixiu/internal/codec"
	wire "pixiu/wire/v1"
)

const (
	lingerFor   = 5 * time.Millisecond // of a message for others of its block, while the part has a block under way
	blockBytes  = 256 << 10            // at which a block leaves without waiting
	maxUnderWay = 8                    // blocks of a part that may be unanswered
	topicStall  = 15 * time.Second
	refreshTick = 200 * time.Millisecond
	spreadBy    = 40_503
	topicAdvice = "sending it again may store it twice"
)

type topicTicket struct {
	number   uint64 // of the offer
	encoded  codec.Encoded
	size     int
	level    wire.Level
	progress uint64 // the application's number; 0: none
	at       time.Time
	deadline time.Time
	attempts int
	resolved bool
	err      *Error
	done     chan struct{}
	part     uint32
	offset   int64 // -1: not known
}

type sentBlock struct {
	first   uint64
	tickets []*topicTicket
	data    []byte
	request uint64 // 0: it is not under way
	done    bool
}

func (b *sentBlock) last() uint64 { return b.first + uint64(len(b.tickets)) - 1 }

// partStream is what goes to one part: messages numbered from 1 without a hole.
type partStream struct {
	part            Part
	queue           []*topicTicket
	queueBytes      int
	blocks          []*sentBlock // not confirmed; the first `sent` are under way
	sent            int
	confirmed, safe uint64
	doubtful, ended bool
	touched         bool // the part has something of this writer, or of the parts before it
	restUntil       time.Time
}

// firstNumber is that of the first message that is not confirmed.
func (p *partStream) firstNumber() uint64 {
	if len(p.blocks) > 0 {
		return p.blocks[0].tickets[0].number
	}
	return p.queue[0].number
}

func (p *partStream) busy() bool { return len(p.queue) > 0 || len(p.blocks) > 0 }

// mayHave: a block whose positions the part has is in it, unless others had used the positions.
func (p *partStream) mayHave(block *sentBlock) bool {
	return !p.doubtful || !slices.ContainsFunc(block.tickets, func(t *topicTicket) bool { return t.attempts <= 1 })
}

// dissolve puts what is in blocks back to the queue, to be sent under other positions. What is stored is left out.
func (p *partStream) dissolve() {
	var tickets []*topicTicket
	for _, block := range p.blocks {
		if block.done {
			continue
		}
		for _, t := range block.tickets {
			t.attempts = 0
			tickets = append(tickets, t)
			p.queueBytes += t.size
		}
	}
	p.blocks, p.sent, p.queue = nil, 0, append(tickets, p.queue...)
}

type topicGroup struct {
	link       leaderLink
	call       *topicCall // nil: there is no stream
	open       bool
	draining   bool
	underWay   int
	window     int
	progressAt time.Time
	busy       []*partStream
}

type sentAs struct {
	stream *partStream
	block  *sentBlock
}

// topicSender decides which block goes to which leader, and what is confirmed.
type topicSender struct {
	client *Client
	name   string
	writer uint64
	user   *follower
	epoch  uint64 // of a writer with a name: when it was opened

	mu         sync.Mutex
	topic      *topicMap
	streams    map[uint32]*partStream // by part
	older      map[uint32]*partStream // those whose part is sealed, and that are not settled
	groups     map[uint32]*topicGroup
	requests   map[uint64]sentAs
	last       uint64 // number of a request
	offered    uint64
	unresolved int
	bytes      int
	space      chan struct{}
	wake       chan struct{}
	spread     uint64
	spreadLeft int
	refreshAt  time.Time
	lastReason string
	failed     *Error
	resumed    *resumed // of a writer with a name: what it had stored when it opened
	progress   uint64   // of the last message that was offered
	touched    map[uint32]bool
	firstError *Error
}

func (s *topicSender) usable() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed == nil
}

// offer queues a message, waiting for space. inTurn: it names no slot.
func (s *topicSender) offer(ctx context.Context, t *topicTicket, inTurn bool) error {
	options := &s.client.options
	s.mu.Lock()
	for s.failed == nil && s.unresolved > 0 && (s.unresolved >= options.QueueRecords || s.bytes+t.size > options.QueueBytes) {
		space := s.space
		s.mu.Unlock()
		select {
		case <-space:
		case <-ctx.Done():
			return fail(ErrNotSent, "the message was not sent in time: the client's queue was full").by(ctx.Err())
		}
		s.mu.Lock()
	}
	defer s.mu.Unlock()
	if s.failed != nil {
		return s.failed
	}
	if ctx.Err() != nil {
		return fail(ErrNotSent, "the message was not sent: its time was over").by(ctx.Err())
	}
	if inTurn {
		if s.spreadLeft <= 0 {
			s.spread, s.spreadLeft = s.spread+1, blockBytes
		}
		parts := s.topic.open
		place := parts[s.spread%uint64(len(parts))]
		turn := s.spread / uint64(len(parts))
		t.encoded.Slot = place.Low + int(turn*spreadBy%uint64(place.High-place.Low))
		s.spreadLeft -= t.size
	}
	if s.resumed != nil && (t.progress > 0 || s.progress > 0) {
		if t.progress <= s.progress {
			return fail(ErrInvalidArgument, "progress rises with every message; %d follows %d", t.progress, s.progress)
		}
		s.progress = t.progress
		if t.progress <= s.resumed.of(t.encoded.Slot) { // it is stored
			t.resolved = true
			close(t.done)
			return nil
		}
	}
	s.offered++
	t.number, t.at = s.offered, time.Now()
	t.deadline = t.at.Add(options.TopicTimeout)
	s.unresolved++
	s.bytes += t.size
	stream := s.streamOf(t.encoded.Slot)
	stream.queue = append(stream.queue, t)
	stream.queueBytes += t.size
	s.want(s.busyGroup(stream))
	signalTo(s.wake)
	return nil
}

func (s *topicSender) wait(ctx context.Context, t *topicTicket) error {
	select {
	case <-t.done:
	case <-ctx.Done():
		s.mu.Lock()
		if !t.resolved {
			s.settle(t, s.late(t).by(ctx.Err()))
		}
		s.mu.Unlock()
	}
	if t.err != nil {
		return t.err
	}
	return nil
}

func (s *topicSender) late(t *topicTicket) *Error {
	because := ""
	if s.lastReason != "" {
		because = " (last failure: " + s.lastReason + ")"
	}
	if t.attempts > 0 {
		return fail(ErrOutcomeUnknown, "no leader confirmed the message in time%s: it may be stored; %s", because, topicAdvice)
	}
	return fail(ErrNotSent, "the message was not sent in time: no leader took it%s; check `pixiu status`, then send again", because)
}

func (s *topicSender) idle(ctx context.Context) error {
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
			return fail(ErrOutcomeUnknown, "%d messages to topic %s are still unresolved", left, s.name).by(ctx.Err())
		}
	}
}

func (s *topicSender) streamOf(slot int) *partStream {
	part, _ := s.topic.openPart(slot) // open parts hold every slot
	stream := s.streams[part.Number]
	if stream == nil {
		stream = &partStream{part: part}
		if s.resumed != nil {
			stream.confirmed = s.resumed.stored[part.Number].position
			stream.safe, stream.doubtful, stream.touched = stream.confirmed, true, s.isTouched(part.Number)
		}
		s.streams[part.Number] = stream
	}
	return stream
}

// isTouched: something of the writer is known to be in a part, or for each of its slots in the parts before it.
func (s *topicSender) isTouched(number uint32) bool {
	part, kept := s.topic.parts[number]
	if !kept || s.touched[number] {
		return s.touched[number]
	}
	if s.resumed.stored[number].position > 0 || s.resumed.covers(part.Low, part.High) {
		return true
	}
	return len(part.Parents) > 0 && !slices.ContainsFunc(part.Parents, func(each uint32) bool { return !s.isTouched(each) })
}

// barrier is the number of the first message of another part that has none of a writer with a name. Later ones wait until it is
// confirmed: so what is missing in such a part after a restart is later than all that is stored.
func (s *topicSender) barrier(stream *partStream) uint64 {
	first := uint64(math.MaxUint64)
	if s.resumed == nil || s.progress == 0 {
		return first
	}
	for _, each := range s.streams {
		if each != stream && !each.touched && each.busy() {
			first = min(first, each.firstNumber())
		}
	}
	return first
}

func (s *topicSender) busyGroup(stream *partStream) *topicGroup {
	group := s.groups[stream.part.Group]
	if group == nil {
		group = &topicGroup{}
		group.link.set(s.topic.groups[stream.part.Group])
		s.groups[stream.part.Group] = group
	}
	if !slices.Contains(group.busy, stream) {
		group.busy = append(group.busy, stream)
	}
	return group
}

// want opens a stream if there is something to send and none is open, or wakes the one that is.
func (s *topicSender) want(group *topicGroup) {
	if group.call != nil {
		signalTo(group.call.wake)
		return
	}
	if s.failed != nil || !slices.ContainsFunc(group.busy, func(p *partStream) bool { return p.busy() && !p.ended }) ||
		time.Now().Before(group.link.restUntil) {
		return
	}
	address := group.link.address()
	if address == "" {
		group.link.failed(&s.client.options, s.client.options.MaxBackoff, "", 0)
		s.client.topicMaps.refresh(s.name, false)
		return
	}
	call := &topicCall{sender: s, group: group, address: address, wake: make(chan struct{}, 1), answered: make(chan struct{})}
	call.ctx, call.cancel = context.WithCancel(s.client.ctx)
	group.call, group.progressAt = call, time.Now()
	s.client.tasks.Go(call.run)
}

// isBlocked: a part before this one is not settled.
func (s *topicSender) isBlocked(stream *partStream) bool {
	for _, older := range s.older {
		if older.busy() && older.part.Number < stream.part.Number && older.part.Low < stream.part.High && stream.part.Low < older.part.High {
			return true
		}
	}
	return false
}

// next is the next block for a stream. lingers: there will be one in a moment.
func (s *topicSender) next(call *topicCall) (request *wire.TopicWriteRequest, lingers bool) {
	group, now := call.group, time.Now()
	if group.call != call || !group.open || group.draining {
		return nil, false
	}
	for at := range len(group.busy) {
		stream := group.busy[at]
		if stream.ended || stream.sent >= maxUnderWay || s.isBlocked(stream) {
			continue
		}
		if now.Before(stream.restUntil) {
			lingers = true
			continue
		}
		if stream.sent == len(stream.blocks) {
			if len(stream.queue) == 0 {
				continue
			}
			if stream.sent > 0 && stream.queueBytes < blockBytes && now.Before(stream.queue[0].at.Add(lingerFor)) {
				lingers = true
				continue
			}
			if !s.cut(stream) {
				continue
			}
		}
		block := stream.blocks[stream.sent]
		if group.underWay > 0 && group.underWay+len(block.data) > group.window {
			return nil, false
		}
		if group.underWay == 0 {
			group.progressAt = now
		}
		group.busy = append(slices.Delete(group.busy, at, at+1), stream) // the others first next time
		for _, t := range block.tickets {
			t.attempts++
		}
		s.last++
		block.request = s.last
		s.requests[block.request] = sentAs{stream, block}
		stream.sent++
		group.underWay += len(block.data)
		return &wire.TopicWriteRequest{Request: block.request, Block: block.data, Level: block.tickets[0].level, Epoch: s.epoch}, false
	}
	return nil, lingers
}

// cut makes a block of the first messages of a queue.
func (s *topicSender) cut(stream *partStream) bool {
	size, barrier := codec.BlockHead, s.barrier(stream)
	var taken []*topicTicket
	var encoded []codec.Encoded
	for len(stream.queue) > 0 {
		t := stream.queue[0]
		if t.resolved && t.attempts == 0 { // its time was over before it was sent
			stream.queue, stream.queueBytes = stream.queue[1:], stream.queueBytes-t.size
			continue
		}
		if t.number > barrier || len(taken) > 0 && (size+t.size > codec.MaxBlockBytes || size >= blockBytes || t.level != taken[0].level) {
			break
		}
		stream.queue, stream.queueBytes = stream.queue[1:], stream.queueBytes-t.size
		taken, encoded, size = append(taken, t), append(encoded, t.encoded), size+t.size
	}
	if len(taken) == 0 {
		return false
	}
	progress := taken[len(taken)-1].progress
	if len(stream.queue) == 0 && s.resumed != nil {
		progress = s.progress // the part has everything up to it
	}
	first := stream.confirmed + 1
	if count := len(stream.blocks); count > 0 {
		first = stream.blocks[count-1].last() + 1
	}
	data := codec.JoinBlock(encoded, s.topic.id, stream.part.Number, s.writer, first, progress)
	stream.blocks = append(stream.blocks, &sentBlock{first: first, tickets: taken, data: data})
	return true
}

// leave ends a group's stream: everything under way is sent again.
func (s *topicSender) leave(group *topicGroup, leader string, after time.Duration) {
	if group.call != nil {
		group.call.cancel()
	}
	group.call, group.open, group.draining, group.underWay = nil, false, false, 0
	for _, stream := range group.busy {
		s.unsend(stream, 0)
	}
	group.link.failed(&s.client.options, s.client.options.MaxBackoff, leader, after)
	if leader == "" {
		s.client.topicMaps.refresh(s.name, false)
	}
	s.want(group)
	signalTo(s.wake)
}

// unsend: blocks from this one on are not under way any more; late answers to them are passed over.
func (s *topicSender) unsend(stream *partStream, first int) {
	for at := first; at < stream.sent; at++ {
		block := stream.blocks[at]
		if _, known := s.requests[block.request]; known {
			delete(s.requests, block.request)
			group := s.groups[stream.part.Group]
			group.underWay = max(0, group.underWay-len(block.data))
		}
		block.request = 0
	}
	stream.sent = min(stream.sent, first)
}

// results takes answers to blocks.
func (s *topicSender) results(call *topicCall, results []*wire.TopicWriteResult) {
	group := call.group
	for _, result := range results {
		if group.call != call {
			return // it does not lead, and everything is sent again
		}
		found, known := s.requests[result.Request]
		if !known {
			continue
		}
		delete(s.requests, result.Request)
		group.underWay -= len(found.block.data)
		group.progressAt = time.Now()
		found.block.request = 0
		if !found.block.done {
			s.answered(group, found.stream, found.block, result)
		}
	}
	group.busy = slices.DeleteFunc(group.busy, func(p *partStream) bool { return !p.busy() })
	if group.call == call && group.draining && group.underWay == 0 {
		s.leave(group, "", 0)
	}
	if len(s.older) > 0 {
		s.tidy()
	}
	for _, each := range s.groups {
		s.want(each)
	}
}

func (s *topicSender) answered(group *topicGroup, stream *partStream, block *sentBlock, result *wire.TopicWriteResult) {
	_, kept := s.topic.parts[stream.part.Number]
	gone := result.Verdict == wire.WriteVerdict_WRITE_NOT_HERE && !kept
	switch {
	case result.Verdict == wire.WriteVerdict_WRITE_STORED, result.Verdict == wire.WriteVerdict_WRITE_REPEATED && stream.mayHave(block):
		s.stored(stream, block, result.Base)
		s.advance(stream)
	case result.Verdict == wire.WriteVerdict_WRITE_REPEATED:
		s.renumber(stream, result.Position)
	case result.Verdict == wire.WriteVerdict_WRITE_HOLE:
		if result.Position < stream.safe { // it led before, and knows less than what was confirmed
			s.lastReason = "a replica that no longer leads answered"
			s.leave(group, "", 0)
			return
		}
		s.catchUp(stream, result.Position)
	case result.Verdict == wire.WriteVerdict_WRITE_SEALED, gone:
		if !gone {
			s.catchUp(stream, max(result.Position, stream.confirmed))
		}
		if s.failed != nil {
			return
		}
		s.unsend(stream, 0)
		stream.dissolve()
		stream.ended = true
		s.older[stream.part.Number] = stream
		var children []Part
		for _, each := range result.Children {
			children = append(children, partOf(each))
		}
		s.topic = s.topic.followed(children)
		s.client.topicMaps.refresh(s.name, true)
		s.learned()
	default:
		s.refused(group, stream, block, result)
	}
}

func (s *topicSender) refused(group *topicGroup, stream *partStream, block *sentBlock, result *wire.TopicWriteResult) {
	why := refusal(result.Verdict.String(), "", 0)
	if result.Refusal != nil {
		why = refused(result.Refusal, s.name)
	}
	s.lastReason = why.Code + ": " + why.Text
	switch why.Code {
	case "NOT_ALLOWED", "INVALID_ARGUMENT", "RECORD_TOO_LARGE", "MALFORMED", "DISK_FULL", "UNAUTHENTICATED":
		unsure := slices.ContainsFunc(block.tickets, func(t *topicTicket) bool { return t.attempts > 1 })
		for _, t := range block.tickets {
			if !t.resolved && unsure {
				s.settle(t, inDoubt(why, topicAdvice))
			} else if !t.resolved {
				s.settle(t, why)
			}
		}
		// It is left out: those after it move up, under other positions.
		at := slices.Index(stream.blocks, block)
		s.unsend(stream, at)
		rest := &partStream{blocks: stream.blocks[at+1:], queue: stream.queue, queueBytes: stream.queueBytes}
		rest.dissolve()
		stream.blocks, stream.queue, stream.queueBytes = stream.blocks[:at], rest.queue, rest.queueBytes
		return
	case "STALE_WRITER":
		never := map[*topicTicket]bool{} // what was sent once is not stored
		for _, each := range stream.blocks[slices.Index(stream.blocks, block):] {
			for _, t := range each.tickets {
				never[t] = t.attempts == 1
			}
		}
		s.failAll(why, never)
		return
	case "NOT_LEADER", "DRAINING":
		s.leave(group, why.leader, why.RetryAfter)
		return
	}
	s.unsend(stream, slices.Index(stream.blocks, block))
	stream.restUntil = time.Now().Add(max(why.RetryAfter, time.Duration(float64(refreshTick)*(0.5+0.5*rand.Float64()))))
	if result.Verdict == wire.WriteVerdict_WRITE_NOT_HERE || result.Verdict == wire.WriteVerdict_WRITE_FULL {
		s.client.topicMaps.refresh(s.name, true)
	}
}

func (s *topicSender) stored(stream *partStream, block *sentBlock, base int64) {
	block.done = true
	for at, t := range block.tickets {
		t.part = stream.part.Number
		if base >= 0 {
			t.offset = base + int64(at)
		}
		if !t.resolved {
			s.settle(t, nil)
		}
	}
}

func (s *topicSender) advance(stream *partStream) {
	for len(stream.blocks) > 0 && stream.blocks[0].done {
		block := stream.blocks[0]
		stream.blocks = stream.blocks[1:]
		stream.confirmed = block.last()
		if level := block.tickets[0].level; level == wire.Level_REPLICATED || level == wire.Level_STORED {
			stream.safe = stream.confirmed
		}
		stream.sent = max(0, stream.sent-1)
		if stream.touched = true; s.resumed != nil {
			s.touched[stream.part.Number] = true
		}
	}
}

// catchUp: a leader has messages up to a position, and what it got does not follow: go on after it.
func (s *topicSender) catchUp(stream *partStream, position uint64) {
	s.unsend(stream, 0)
	for _, block := range stream.blocks {
		if block.last() > position || !(block.done || stream.mayHave(block)) {
			break
		}
		s.stored(stream, block, -1)
	}
	s.advance(stream)
	if stream.confirmed != position {
		s.renumber(stream, position)
	}
}

// renumber gives everything that is not confirmed other positions. A writer with a name ends where the leader has more: another
// process stored that, perhaps the same rows.
func (s *topicSender) renumber(stream *partStream, position uint64) {
	s.unsend(stream, 0)
	if s.resumed != nil && position > stream.confirmed {
		s.failAll(fail(ErrInvalidArgument, "another process writes under this writer's name; end it, open the writer again, and go on "+
			"after its progress"), nil)
		return
	}
	stream.dissolve()
	stream.confirmed, stream.doubtful = position, true
}

func (s *topicSender) onTopic(m *topicMap) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.topic == nil || s.failed != nil {
		return
	}
	if m.deleted || m.id != s.topic.id {
		s.failAll(errGone(s.name), nil)
		return
	}
	if m.version >= s.topic.version {
		// What a leader named and the description does not have yet stays known.
		var ahead []Part
		for number, part := range s.topic.parts {
			if _, known := m.parts[number]; !known && m.version == s.topic.version {
				ahead = append(ahead, part)
			}
		}
		m = m.followed(ahead)
		s.topic = m
		s.learned()
	}
}

// learned: the topic has changed, as far as is known.
func (s *topicSender) learned() {
	for number, group := range s.groups {
		group.link.set(s.topic.groups[number])
	}
	for number, stream := range s.streams {
		if part, kept := s.topic.parts[number]; kept && !part.Sealed {
			continue
		}
		if stream.busy() {
			s.older[number] = stream
		} else {
			delete(s.streams, number)
		}
	}
	// What sealed parts did not take goes to the parts that follow them, once these are known.
	for _, stream := range s.older {
		if !stream.ended {
			continue
		}
		if part, kept := s.topic.parts[stream.part.Number]; kept && !part.Sealed {
			s.refreshAt = time.Now().Add(refreshTick)
			continue
		}
		moved := stream.queue
		stream.queue, stream.queueBytes = nil, 0
		for _, t := range moved {
			if t.resolved {
				continue
			}
			t.attempts = 0 // none of it is stored
			child := s.streamOf(t.encoded.Slot)
			child.queue = append(child.queue, t)
			child.queueBytes += t.size
			s.busyGroup(child)
			slices.SortStableFunc(child.queue, func(a, b *topicTicket) int { return int(a.number) - int(b.number) })
		}
	}
	s.tidy()
	for _, group := range s.groups {
		s.want(group)
	}
	signalTo(s.wake)
}

// tidy forgets sealed parts that are settled: those that follow them may go on.
func (s *topicSender) tidy() {
	for number, stream := range s.older {
		if part, kept := s.topic.parts[number]; !stream.busy() && (!kept || part.Sealed) {
			delete(s.older, number)
			delete(s.streams, number)
		}
	}
}

func (s *topicSender) settle(t *topicTicket, err *Error) {
	t.resolved, t.err = true, err
	if err != nil && s.firstError == nil {
		s.firstError = err
	}
	s.unresolved--
	s.bytes -= t.size
	close(t.done)
	close(s.space)
	s.space = make(chan struct{})
}

func (s *topicSender) end(why *Error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failAll(why, nil)
}

// failAll ends the writer. never: messages that were sent, and are not stored.
func (s *topicSender) failAll(why *Error, never map[*topicTicket]bool) {
	if s.failed != nil {
		return
	}
	s.failed = why
	for _, stream := range s.streams {
		for _, block := range stream.blocks {
			stream.queue = append(stream.queue, block.tickets...)
		}
		for _, t := range stream.queue {
			if t.resolved {
				continue
			}
			if t.attempts > 0 && !never[t] {
				s.settle(t, inDoubt(why, topicAdvice))
			} else {
				s.settle(t, why)
			}
		}
	}
	for _, group := range s.groups {
		if group.call != nil {
			group.call.cancel()
			group.call = nil
		}
	}
	signalTo(s.wake)
}

// run ends back-offs, messages whose time is over, and silent streams.
func (s *topicSender) run() {
	defer s.client.topicMaps.leave(s.name, s.user)
	for s.client.ctx.Err() == nil {
		s.mu.Lock()
		if s.failed != nil {
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
		}
	}
}

func (s *topicSender) tick(now time.Time) time.Duration {
	next := now.Add(time.Hour)
	earlier := func(at time.Time) {
		if at.Before(next) {
			next = at
		}
	}
	if s.unresolved == 0 && len(s.older) == 0 {
		return time.Hour
	}
	s.tidy()
	if !s.refreshAt.IsZero() && now.After(s.refreshAt) {
		s.refreshAt = time.Time{}
		s.learned()
		if !s.refreshAt.IsZero() {
			s.client.topicMaps.refresh(s.name, true)
		}
	}
	if !s.refreshAt.IsZero() {
		earlier(s.refreshAt)
	}
	for _, stream := range s.streams {
		tickets := stream.queue
		for _, block := range stream.blocks {
			tickets = append(slices.Clone(block.tickets), tickets...)
		}
		for _, t := range tickets {
			if t.resolved {
				continue
			}
			if now.Before(t.deadline) {
				earlier(t.deadline)
			} else {
				s.settle(t, s.late(t))
			}
		}
		if stream.restUntil.After(now) {
			earlier(stream.restUntil)
		}
	}
	for _, group := range s.groups {
		waits := group.call != nil && (!group.open || group.underWay > 0)
		if waits && now.Sub(group.progressAt) >= topicStall {
			s.lastReason = "no answer for " + topicStall.String()
			s.leave(group, "", 0)
		} else if waits {
			earlier(group.progressAt.Add(topicStall))
		}
		if group.call == nil && len(group.busy) > 0 {
			earlier(group.link.restUntil)
		}
		s.want(group)
	}
	return max(time.Until(next), 10*time.Millisecond)
}

package pixiu

import (
	"context"
	"iter"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"pixiu/internal/codec"
	wire "pixiu/wire/v1"
)

const (
	readWaitMs    = 10_000
	readBytes     = 1 << 20
	leastRead     = 64 << 10
	readUnderWay  = 64 << 20
	bufferBatches = 64
	unreadableFor = 30 * time.Second
)

// A Start says where a reader begins.
type Start struct {
	end      bool
	atUs     int64
	position map[uint32]uint64
}

// Earliest begins with the first message that is kept.
func Earliest() Start { return Start{} }

// Latest begins with what is stored from now on.
func Latest() Start { return Start{end: true} }

// FromTime begins with the first block that was stored then or later.
func FromTime(at time.Time) Start { return Start{atUs: max(at.UnixMicro(), 1)} }

// FromPosition goes on where another reader was.
func FromPosition(position map[uint32]uint64) Start { return Start{position: position} }

// A TopicGap is messages that a reader does not get: they are kept no more, or nobody can read them.
type TopicGap struct {
	Part      uint32
	Low, High uint64 // offsets [Low, High)
}

type partRead struct {
	part     Part
	where    uint64 // to read from
	next     uint64 // that the application gets
	known    bool   // next is
	first    bool   // it begins with whatever is kept: what was dropped before is no gap
	finished bool
	reading  bool
}

type readBatch struct {
	part     uint32
	messages []*TopicMessage
	next     uint64
	gap      *TopicGap
	finished bool
}

// A TopicReader reads everything of a durable topic from a place on, without a channel. One goroutine at a time takes messages.
type TopicReader struct {
	client   *Client
	name     string
	start    Start
	onGap    func(TopicGap)
	loadTest LoadTest
	user     *follower
	ctx      context.Context
	cancel   context.CancelFunc
	tasks    sync.WaitGroup

	mu      sync.Mutex
	topic   *topicMap
	parts   map[uint32]*partRead
	before  map[uint32]bool // parts that were read before
	batches []readBatch
	current *readBatch
	changed chan struct{}
	err     error
	closed  bool
}

// A ReaderOption is an option of a reader.
type ReaderOption func(*TopicReader)

// OnTopicGap hears of messages that are missing. It must not block.
func OnTopicGap(call func(TopicGap)) ReaderOption { return func(r *TopicReader) { r.onGap = call } }

// ReadLoadTests says what of load tests comes.
func ReadLoadTests(which LoadTest) ReaderOption { return func(r *TopicReader) { r.loadTest = which } }

// Reader reads the topic from a start on. Messages of a part come in the order in which they were stored, so those of a key do; a
// part comes after those before it. The cluster keeps nothing of a reader.
func (t *Topic) Reader(ctx context.Context, start Start, options ...ReaderOption) (*TopicReader, error) {
	if err := checkName(t.Name, "topic"); err != nil {
		return nil, err
	}
	c := t.client
	r := &TopicReader{
		client: c, name: t.Name, start: start, parts: map[uint32]*partRead{}, before: map[uint32]bool{}, changed: make(chan struct{}),
	}
	for _, each := range options {
		each(r)
	}
	r.ctx, r.cancel = context.WithCancel(c.ctx)
	r.user = &follower{onTopic: r.onTopic, onEnd: func(why *Error) { r.fail(why) }}
	m, err := c.topicMaps.follow(ctx, t.Name, 0, r.user)
	if err == nil {
		err = r.begin(ctx, m)
	}
	if err == nil {
		err = c.add(r)
	}
	if err != nil {
		c.topicMaps.leave(t.Name, r.user)
		r.cancel()
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.topic = m
	r.setTopic(m)
	r.launch()
	return r, nil
}

// begin finds the offsets at which parts begin.
func (r *TopicReader) begin(ctx context.Context, m *topicMap) error {
	if r.start.position != nil {
		return r.resume(m)
	}
	for number, part := range m.parts {
		if r.start.end && part.Sealed {
			r.before[number] = true
			continue
		}
		each := &partRead{part: part, first: !r.start.end && r.start.atUs == 0}
		if r.start.end || r.start.atUs > 0 {
			request := &wire.TopicReadRequest{Topic: r.name, Part: number, MaxBytes: 1}
			if r.start.end {
				request.Start = &wire.TopicReadRequest_End{End: true}
			} else {
				request.Start = &wire.TopicReadRequest_TimeUs{TimeUs: uint64(r.start.atUs)}
			}
			reply, err := r.ask(ctx, part.Group, request)
			if err != nil {
				return err
			}
			each.where = reply.Next
			if block, _, err := codec.DecodeStored(reply.Blocks); err == nil && !r.start.end {
				each.where = block.Base
			}
			each.next, each.known = each.where, true
		}
		r.parts[number] = each
	}
	return nil
}

func (r *TopicReader) resume(m *topicMap) error {
	known := false
	var todo []uint32
	for number, offset := range r.start.position {
		if part, kept := m.parts[number]; kept {
			known = true
			todo = append(todo, part.Parents...)
			r.parts[number] = &partRead{part: part, where: offset, next: offset, known: true}
		}
	}
	if !known && len(r.start.position) > 0 {
		return fail(ErrInvalidArgument, "the topic %s has no part of this position: it is of another topic, or too old", r.name)
	}
	for len(todo) > 0 {
		number := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if part, kept := m.parts[number]; kept && !r.before[number] && r.parts[number] == nil {
			r.before[number] = true
			todo = append(todo, part.Parents...)
		}
	}
	return nil
}

func (r *TopicReader) notify() {
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *TopicReader) onTopic(m *topicMap) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.topic == nil || r.closed:
	case m.deleted || m.id != r.topic.id:
		if r.err == nil {
			r.err = errGone(r.name)
		}
		r.notify()
	case m.version >= r.topic.version:
		r.setTopic(m)
		r.launch()
	}
}

// setTopic: parts that were added are read from their beginning.
func (r *TopicReader) setTopic(m *topicMap) {
	r.topic = m
	for number, part := range m.parts {
		if each := r.parts[number]; each != nil {
			each.part = part
		} else if !r.before[number] {
			r.parts[number] = &partRead{part: part}
		}
	}
}

func (r *TopicReader) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err == nil {
		r.err = err
	}
	r.notify()
}

func (r *TopicReader) isDone(number uint32) bool {
	each := r.parts[number]
	return each == nil || each.finished
}

// launch begins to read parts whose parents are done.
func (r *TopicReader) launch() {
	if r.closed || r.err != nil {
		return
	}
	for _, each := range r.parts {
		ready := !each.reading && !each.finished
		for _, parent := range each.part.Parents {
			ready = ready && r.isDone(parent)
		}
		if ready {
			each.reading = true
			r.tasks.Go(func() { r.read(each) })
		}
	}
}

func (r *TopicReader) ask(ctx context.Context, group uint32, request *wire.TopicReadRequest) (*wire.TopicReadReply, error) {
	wait := readWaitMs * time.Millisecond
	return askLeader(ctx, r.client, r.name, group, wait+askFor, wait+unreadableFor,
		func(ctx context.Context, stub wire.TopicLogClient, trailer *metadata.MD) (*wire.TopicReadReply, *wire.TopicRefusal, error) {
			reply, err := stub.Read(ctx, request, grpc.Trailer(trailer))
			return reply, nil, err
		})
}

// read reads one part until it is finished.
func (r *TopicReader) read(each *partRead) {
	for failures := 0; r.ctx.Err() == nil; {
		r.mu.Lock()
		for len(r.batches) >= bufferBatches {
			changed := r.changed
			r.mu.Unlock()
			select {
			case <-changed:
			case <-r.ctx.Done():
				return
			}
			r.mu.Lock()
		}
		part, where := each.part, each.where
		limit := min(readBytes, max(leastRead, readUnderWay/max(1, len(r.parts))))
		r.mu.Unlock()
		began := time.Now()
		reply, err := r.ask(r.ctx, part.Group, &wire.TopicReadRequest{
			Topic: r.name, Part: part.Number, MaxBytes: uint32(limit), WaitMs: readWaitMs, Start: &wire.TopicReadRequest_Offset{Offset: where},
		})
		var batch readBatch
		if err == nil {
			batch, err = r.batchOf(part.Number, where, reply)
		}
		if err != nil {
			if r.ctx.Err() == nil {
				r.fail(err)
			}
			return
		}
		r.mu.Lock()
		if each.first && batch.gap != nil && batch.gap.High <= reply.First {
			batch.gap = nil
		}
		each.first, each.where = false, batch.next
		if len(batch.messages) > 0 || batch.gap != nil || batch.finished || batch.next != where {
			r.batches = append(r.batches, batch)
			r.notify()
		}
		r.mu.Unlock()
		if batch.finished {
			r.client.topicMaps.refresh(r.name, false)
			return
		}
		if failures++; batch.next != where || time.Since(began) > readWaitMs*time.Millisecond/2 {
			failures = 0
		} else {
			pause(r.ctx, afterFailures(failures, r.client.options.Backoff, time.Second)) // a leader that does not wait
		}
	}
}

func (r *TopicReader) batchOf(part uint32, low uint64, reply *wire.TopicReadReply) (readBatch, error) {
	batch := readBatch{part: part, next: max(reply.Next, low)}
	for data := reply.Blocks; len(data) > 0; {
		block, rest, err := codec.DecodeStored(data)
		if err != nil {
			return batch, fail(ErrUnavailable, "a block of part %d of %s was damaged on the way: %v; read again", part, r.name, err)
		}
		data = rest
		for _, stored := range block.Messages {
			offset := block.Base + uint64(stored.Number)
			if offset < low || !r.loadTest.passes(stored.Flags&codec.BitLoadTest != 0) {
				continue
			}
			message, err := topicMessage(r.name, part, offset, block.AtUs, block.Sender, stored)
			if err != nil {
				return batch, err
			}
			batch.messages = append(batch.messages, message)
		}
	}
	if reply.GapHigh > reply.GapLow {
		batch.gap = &TopicGap{part, reply.GapLow, reply.GapHigh}
	}
	batch.finished = reply.Sealed && batch.next >= reply.CommittedEnd
	return batch, nil
}

// Next waits for the next message. After Close it fails with ErrNotConnected; after a refusal with that.
func (r *TopicReader) Next(ctx context.Context) (*TopicMessage, error) {
	for {
		r.mu.Lock()
		if r.closed {
			r.mu.Unlock()
			return nil, fail(ErrNotConnected, "the reader is closed")
		}
		if r.current == nil && len(r.batches) > 0 {
			batch := r.batches[0]
			r.batches = r.batches[1:]
			r.current = &batch
			r.notify() // there is space
			if batch.gap != nil && r.onGap != nil {
				r.mu.Unlock()
				r.onGap(*batch.gap)
				r.mu.Lock()
			}
		}
		if batch := r.current; batch != nil {
			var message *TopicMessage
			each := r.parts[batch.part]
			if len(batch.messages) > 0 {
				message, batch.messages = batch.messages[0], batch.messages[1:]
				each.next, each.known = message.Offset+1, true
			}
			if len(batch.messages) == 0 {
				r.done(each, batch)
				r.current = nil
			}
			r.mu.Unlock()
			if message != nil {
				return message, nil
			}
			continue
		}
		err, changed := r.err, r.changed
		r.mu.Unlock()
		if err != nil {
			return nil, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fail(ErrUnavailable, "no message came in time").by(ctx.Err())
		}
	}
}

// done: the application has a batch.
func (r *TopicReader) done(each *partRead, batch *readBatch) {
	each.next, each.known = batch.next, true
	if !batch.finished {
		return
	}
	each.finished, each.reading = true, false
	for number, part := range r.parts { // forget finished parts whose children are all being read, or were
		children := r.topic.children(number)
		begun := len(children) > 0
		for _, child := range children {
			if r.before[child.Number] {
				continue
			}
			for _, parent := range child.Parents {
				begun = begun && r.isDone(parent)
			}
		}
		if part.finished && begun {
			delete(r.parts, number)
			r.before[number] = true
		}
	}
	r.launch()
}

// All iterates over messages until the reader is closed, which ends it, or fails, which is its last value.
func (r *TopicReader) All(ctx context.Context) iter.Seq2[*TopicMessage, error] {
	return func(yield func(*TopicMessage, error) bool) {
		for {
			message, err := r.Next(ctx)
			r.mu.Lock()
			closed := r.closed
			r.mu.Unlock()
			if err != nil && closed {
				return
			}
			if !yield(message, err) || err != nil {
				return
			}
		}
	}
}

// Position is the offset of the next message of each part: FromPosition goes on there.
func (r *TopicReader) Position() map[uint32]uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	found := map[uint32]uint64{}
	for number, each := range r.parts {
		begun := true
		for _, parent := range each.part.Parents {
			begun = begun && r.isDone(parent)
		}
		if each.known || begun {
			found[number] = each.next
		}
	}
	return found
}

// Close stops reading.
func (r *TopicReader) Close() error {
	r.mu.Lock()
	r.closed = true
	r.notify()
	r.mu.Unlock()
	r.client.topicMaps.leave(r.name, r.user)
	r.cancel()
	r.tasks.Wait()
	r.client.forget(r)
	return nil
}

package pixiu

import (
	"context"
	"math/rand/v2"
	"time"

	"pixiu/internal/codec"
	wire "pixiu/wire/v1"
)

// writing is what write options describe.
type writing struct {
	message  codec.TopicMessage
	hasSlot  bool
	level    wire.Level
	progress uint64
}

// A WriteOption is an option of a durable topic's message beside its body.
type WriteOption func(*writing)

// Key keeps the messages with it in order; at most 4,096 bytes.
func Key(key string) WriteOption {
	return func(w *writing) { w.message.HasKey, w.message.Key = true, []byte(key) }
}

// Slot is the logical partition, 0 to 65535; default: that of the key, without a key in turn.
func Slot(slot uint16) WriteOption {
	return func(w *writing) { w.message.Slot, w.hasSlot = int(slot), true }
}

// Header adds a named value, at most 64 of them.
func Header(name string, value []byte) WriteOption {
	return func(w *writing) {
		w.message.Headers = append(w.message.Headers, codec.Header{Name: name, Value: value})
	}
}

// EventTime is when it happened.
func EventTime(at time.Time) WriteOption {
	return func(w *writing) { w.message.EventUs = at.UnixMicro() }
}

// DeliverAt holds the message back from channels until then, at most a year ahead.
func DeliverAt(at time.Time) WriteOption {
	return func(w *writing) { w.message.DeliverAtUs = at.UnixMicro() }
}

// ExpiresIn is the time after which channels no longer deliver it, in whole seconds.
func ExpiresIn(lifetime time.Duration) WriteOption {
	return func(w *writing) { w.message.ExpiresInS = uint32((lifetime + time.Second - 1) / time.Second) }
}

// Tag prefers members of a channel with this tag; at most 100 bytes.
func Tag(tag string) WriteOption { return func(w *writing) { w.message.Tag = tag } }

// WriteLevel says how safe the message is when it is confirmed; default: Replicated.
func WriteLevel(level Level) WriteOption { return func(w *writing) { w.level = wire.Level(level) } }

// WriteLoadTest marks the message as part of a load test.
func WriteLoadTest() WriteOption { return func(w *writing) { w.message.LoadTest = true } }

// A TopicReceipt is that of a durable topic's message.
type TopicReceipt struct {
	sender *topicSender
	ticket *topicTicket
}

// Wait waits until the message is stored at its level.
func (r *TopicReceipt) Wait(ctx context.Context) error { return r.sender.wait(ctx, r.ticket) }

// Done is closed when the outcome is known.
func (r *TopicReceipt) Done() <-chan struct{} { return r.ticket.done }

// Position is where the message is stored. known: it is confirmed, and its leader said where.
func (r *TopicReceipt) Position() (part uint32, offset uint64, known bool) {
	select {
	case <-r.ticket.done:
		if r.ticket.err == nil && r.ticket.offset >= 0 {
			return r.ticket.part, uint64(r.ticket.offset), true
		}
	default:
	}
	return 0, 0, false
}

// Send stores a message, and waits until that is confirmed at its level. It is sent again, under the same position, until its time
// is over, so it is stored once, whatever dies meanwhile.
func (t *Topic) Send(ctx context.Context, body []byte, options ...WriteOption) (*TopicReceipt, error) {
	receipt, err := t.SendSoon(ctx, body, options...)
	if err != nil {
		return nil, err
	}
	return receipt, receipt.Wait(ctx)
}

// SendSoon queues a message, waiting only while the queue is full, and gives a receipt for its outcome. Messages of one client with
// the same key, or slot, are stored in the order of the calls.
func (t *Topic) SendSoon(ctx context.Context, body []byte, options ...WriteOption) (*TopicReceipt, error) {
	found, inTurn, err := topicDraft(body, options)
	if err != nil {
		return nil, err
	}
	if found.progress > 0 {
		return nil, errNoName()
	}
	sender, err := t.client.topicSender(ctx, t.Name)
	if err != nil {
		return nil, err
	}
	if err := sender.offer(ctx, found, inTurn); err != nil {
		return nil, err
	}
	return &TopicReceipt{sender, found}, nil
}

// topicDraft checks a message. inTurn: it names no slot.
func topicDraft(body []byte, options []WriteOption) (t *topicTicket, inTurn bool, err error) {
	w := writing{message: codec.TopicMessage{Body: body}}
	for _, each := range options {
		each(&w)
	}
	data, flags, err := codec.EncodeTopicMessage(&w.message)
	if err != nil {
		return nil, false, fail(ErrInvalidArgument, "%v", err)
	}
	if size := codec.BlockHead + codec.IndexBytes + len(data); size > codec.MaxBlockBytes {
		return nil, false, fail(ErrRecordTooLarge, "a message of %d bytes, headers and key included, is above the limit of %d; send a "+
			"reference to the content instead", size, codec.MaxBlockBytes)
	}
	t = &topicTicket{
		encoded: codec.Encoded{Slot: w.message.Slot, Flags: flags, Data: data}, size: codec.IndexBytes + len(data), level: w.level,
		progress: w.progress, done: make(chan struct{}), offset: -1,
	}
	if w.message.HasKey && !w.hasSlot {
		t.encoded.Slot = codec.SlotOf(w.message.Key)
	}
	return t, !w.message.HasKey && !w.hasSlot, nil
}

// topicSender is the client's writer of a topic.
func (c *Client) topicSender(ctx context.Context, topic string) (*topicSender, error) {
	if err := checkName(topic, "topic"); err != nil {
		return nil, err
	}
	c.mu.Lock()
	found, closed := c.writers[topic], c.closed
	c.mu.Unlock()
	if closed {
		return nil, errClosed()
	}
	if found != nil && found.usable() {
		return found, nil
	}
	s := c.newTopicSender(topic, 1+rand.Uint64N(1<<63-1))
	m, err := c.topicMaps.follow(ctx, topic, 0, s.user)
	if err != nil {
		return nil, err
	}
	s.begin(m)
	c.mu.Lock()
	defer c.mu.Unlock()
	if other := c.writers[topic]; c.closed || (other != nil && other.usable()) {
		c.topicMaps.leave(topic, s.user)
		if c.closed {
			return nil, errClosed()
		}
		return other, nil
	}
	c.writers[topic] = s
	c.tasks.Go(s.run)
	return s, nil
}

func (c *Client) newTopicSender(topic string, writer uint64) *topicSender {
	s := &topicSender{
		client: c, name: topic, writer: writer, streams: map[uint32]*partStream{}, older: map[uint32]*partStream{},
		groups: map[uint32]*topicGroup{}, requests: map[uint64]sentAs{}, space: make(chan struct{}), wake: make(chan struct{}, 1),
		spread: rand.Uint64N(codec.Slots), touched: map[uint32]bool{},
	}
	s.user = &follower{onTopic: s.onTopic, onEnd: s.end}
	return s
}

func (s *topicSender) begin(m *topicMap) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.topic = m
}

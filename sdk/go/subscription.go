package pixiu

import (
	"context"
	"encoding/json"
	"iter"
	"strconv"
	"time"

	"pixiu/internal/codec"
	wire "pixiu/wire/v1"
)

const (
	maxWanted     = 100_000
	maxOverlap    = 100_000          // messages remembered while two gateways deliver the same ones
	lateFor       = 10 * time.Second // after a change of gateway, in which the new one may still send what the old one had sent
	repeatedFor   = 60 * time.Second // after the loss of a gateway, in which senders may repeat what it had delivered
	maxRecent     = 10_000
	recentSignals = 10_000
)

// A Message is what a subscription gets.
type Message struct {
	Room      uint64    // it was sent to; of a free topic the room that carries it; 0: to a user
	Topic     string    // of a free topic, else empty
	User      uint64    // it was sent to; 0: to a room or topic
	Sender    uint64    // UIN; 0: a service
	Payload   []byte    // as it was sent
	ID        uint64    // the sender's SnowflakeID
	Type      uint8     // the application's, 0 to 63
	FirstLane bool      // it overtook messages of the normal lane
	SentAt    time.Time // zero if its ID holds no time
	Extension []byte    // its headers, encoded, or another format
	Lifetime  time.Duration
	Signal    bool
	LoadTest  bool
}

// Headers are the sender's; nil if it sent none, or an extension in another format.
func (m *Message) Headers() map[string]string {
	if len(m.Extension) == 0 || m.Extension[0] != '{' {
		return nil
	}
	var found map[string]string
	if json.Unmarshal(m.Extension, &found) != nil || len(found) > maxHeaders {
		return nil
	}
	return found
}

// Destination is the topic as clients of MQTT name it: "room/42", "user/7", or the free topic's name.
func (m *Message) Destination() string {
	switch {
	case m.Topic != "":
		return m.Topic
	case m.User != 0:
		return "user/" + strconv.FormatUint(m.User, 10)
	}
	return "room/" + strconv.FormatUint(m.Room, 10)
}

func messageOf(r *codec.Record) (*Message, error) {
	m := &Message{
		Sender: r.Sender, Payload: r.Body, ID: r.Snowflake, Type: r.Type & typeMask, FirstLane: r.Type>>6 == 0, Extension: r.Extension,
		Lifetime: time.Duration(r.LifetimeMin) * time.Minute, Signal: r.Kind == codec.KindSignal, LoadTest: r.Flags&codec.FlagLoadTest != 0,
	}
	if r.Flags&codec.FlagDerivedID == 0 {
		m.SentAt = time.UnixMilli(codec.SnowflakeMs(r.Snowflake))
	}
	if r.Kind != codec.KindRoom && r.Flags&codec.FlagToRoom == 0 {
		m.User = r.Key
	} else {
		m.Room = r.Key
	}
	var err error
	if r.Flags&codec.FlagTopic != 0 {
		m.Topic, m.Payload, err = codec.SplitTopic(r.Body)
	}
	return m, err
}

// subscribing is what subscribe options describe.
type subscribing struct {
	rooms     []uint64
	topics    []string
	chat      bool
	loadTest  LoadTest
	onGap     func(string)
	onDropped func(uint64)
}

// A SubscribeOption says what a subscription gets.
type SubscribeOption func(*subscribing)

// Rooms to join.
func Rooms(rooms ...uint64) SubscribeOption {
	return func(s *subscribing) { s.rooms = append(s.rooms, rooms...) }
}

// FreeTopics to join.
func FreeTopics(topics ...string) SubscribeOption {
	return func(s *subscribing) { s.topics = append(s.topics, topics...) }
}

// Chat takes the messages to the client's own user, Options.UIN.
func Chat() SubscribeOption { return func(s *subscribing) { s.chat = true } }

// OnGap hears that a connection was lost, or a permission has ended: messages may be missing. It must not block.
func OnGap(call func(reason string)) SubscribeOption { return func(s *subscribing) { s.onGap = call } }

// OnDropped hears that the gateway dropped messages because this side was too slow. It must not block.
func OnDropped(call func(count uint64)) SubscribeOption {
	return func(s *subscribing) { s.onDropped = call }
}

// LoadTests says what of load tests comes.
func LoadTests(which LoadTest) SubscribeOption { return func(s *subscribing) { s.loadTest = which } }

// A LoadTest says what a receiver gets of messages that are marked as part of a load test.
type LoadTest int32

// Treatments of load tests.
const (
	BlockLoadTests = LoadTest(wire.LoadTest_LOAD_TEST_BLOCK) // the default: marked messages do not come
	PassLoadTests  = LoadTest(wire.LoadTest_LOAD_TEST_PASS)  // they come, too
	OnlyLoadTests  = LoadTest(wire.LoadTest_LOAD_TEST_ONLY)  // nothing else comes
)

func (l LoadTest) passes(marked bool) bool {
	return l == PassLoadTests || marked == (l == OnlyLoadTests)
}

// identity is how a message is recognized that comes again.
type identity struct{ id, room uint64 }

// A Subscription has messages of rooms, free topics and the user. One goroutine at a time takes them.
type Subscription struct {
	conn      *gatewayConn
	subscribe subscribing

	// Guarded by the connection's lock.
	buffer  []*Message
	bytes   int
	dropped uint64

	// Of the goroutine that reads.
	seen     map[identity]bool // while two gateways deliver; nil while there is one
	came     map[identity]bool // of the last change of gateway
	until    time.Time
	recent   [][]identity
	recently int
	signals  [2]map[identity]bool
}

// Subscribe joins rooms and topics. It returns when the whole cluster knows: what is sent from then on arrives. The subscription
// reconnects by itself until it, or the client, is closed.
func (c *Client) Subscribe(ctx context.Context, options ...SubscribeOption) (*Subscription, error) {
	s, err := c.subscription(options...)
	if err != nil {
		return nil, err
	}
	if err := s.conn.settle(ctx); err != nil {
		_ = s.Close()
		return nil, err
	}
	return s, nil
}

// subscription is one that begins to join.
func (c *Client) subscription(options ...SubscribeOption) (*Subscription, error) {
	s := &Subscription{signals: [2]map[identity]bool{{}, {}}}
	for _, each := range options {
		each(&s.subscribe)
	}
	s.conn = newGatewayConn(c, "subscription", c.name, s)
	if s.subscribe.chat && c.options.UIN == 0 {
		return nil, fail(ErrInvalidArgument, "messages to a user need the user's UIN: Options{UIN: …}")
	}
	if err := s.want(s.subscribe.rooms, s.subscribe.topics); err != nil {
		return nil, err
	}
	if len(s.conn.wanted.rooms)+len(s.conn.wanted.topics) == 0 && !s.subscribe.chat {
		return nil, fail(ErrInvalidArgument, "nothing is subscribed to: give Rooms, FreeTopics or Chat")
	}
	return s, s.conn.start()
}

func (s *Subscription) want(rooms []uint64, topics []string) error {
	for _, room := range rooms {
		if room == 0 || room > codec.MaxRoom {
			return fail(ErrInvalidArgument, "a RoomID is from 1 to 2^62-1, not %d", room)
		}
	}
	for _, topic := range topics {
		if err := checkTopic(topic); err != nil {
			return err
		}
	}
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	if len(s.conn.wanted.rooms)+len(s.conn.wanted.topics)+len(rooms)+len(topics) > maxWanted {
		return fail(ErrInvalidArgument, "a subscription has at most %d rooms and topics; use several", maxWanted)
	}
	for _, room := range rooms {
		s.conn.wanted.rooms[room] = true
	}
	for _, topic := range topics {
		s.conn.wanted.topics[topic] = true
	}
	return nil
}

// Join joins further rooms and topics (options Rooms and FreeTopics), and returns when the whole cluster knows. After
// ErrOutcomeUnknown they stay wanted, and are joined once a gateway answers.
func (s *Subscription) Join(ctx context.Context, options ...SubscribeOption) error {
	var more subscribing
	for _, each := range options {
		each(&more)
	}
	if err := s.want(more.rooms, more.topics); err != nil {
		return err
	}
	return s.conn.settle(ctx)
}

// Leave leaves rooms and topics, and returns when the whole cluster knows.
func (s *Subscription) Leave(ctx context.Context, options ...SubscribeOption) error {
	var less subscribing
	for _, each := range options {
		each(&less)
	}
	s.conn.mu.Lock()
	for _, room := range less.rooms {
		delete(s.conn.wanted.rooms, room)
	}
	for _, topic := range less.topics {
		delete(s.conn.wanted.topics, topic)
	}
	s.conn.mu.Unlock()
	return s.conn.settle(ctx)
}

// Gateway is the address of the gateway that serves now; empty while there is none.
func (s *Subscription) Gateway() string {
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	if s.conn.stream == nil {
		return ""
	}
	return s.conn.stream.address
}

// Dropped is how many messages were dropped because this side was too slow.
func (s *Subscription) Dropped() uint64 {
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	return s.dropped
}

// Next waits for the next message. After Close it fails with ErrNotConnected; after a refusal with that.
func (s *Subscription) Next(ctx context.Context) (*Message, error) {
	for {
		s.conn.mu.Lock()
		if s.conn.closed {
			s.conn.mu.Unlock()
			return nil, fail(ErrNotConnected, "the subscription is closed")
		}
		if len(s.buffer) > 0 {
			message := s.buffer[0]
			s.buffer[0] = nil
			s.buffer = s.buffer[1:]
			s.bytes -= len(message.Payload) + codec.HeaderSize
			s.conn.notify()
			s.conn.mu.Unlock()
			return message, nil
		}
		err, changed := s.conn.err, s.conn.changed
		s.conn.mu.Unlock()
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

// All iterates over messages until the subscription is closed, which ends it, or fails, which is its last value.
func (s *Subscription) All(ctx context.Context) iter.Seq2[*Message, error] {
	return func(yield func(*Message, error) bool) {
		for {
			message, err := s.Next(ctx)
			if err != nil && s.isClosed() {
				return
			}
			if !yield(message, err) || err != nil {
				return
			}
		}
	}
}

func (s *Subscription) isClosed() bool {
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	return s.conn.closed
}

// Run calls a handler with each message, one after the other, until the subscription is closed (nil), fails, or the handler does.
func (s *Subscription) Run(ctx context.Context, handler func(*Message) error) error {
	for message, err := range s.All(ctx) {
		if err != nil {
			return err
		}
		if err := handler(message); err != nil {
			return err
		}
	}
	return nil
}

// Close leaves everything and stops.
func (s *Subscription) Close() error {
	s.conn.close()
	return nil
}

func (s *Subscription) source() interface{ Close() error } { return s }

func (s *Subscription) hello() *wire.SubscribeHello {
	options := &s.conn.client.options
	return &wire.SubscribeHello{
		Uin: options.UIN, Client: s.conn.client.name, Chat: s.subscribe.chat, Device: options.Device, DeviceClass: options.DeviceClass,
	}
}

func (s *Subscription) opened(*gatewayStream) {}

func (s *Subscription) ended(*gatewayStream) {}

func (s *Subscription) lost(reason string) {
	came := map[identity]bool{}
	for each := range s.came {
		came[each] = true
	}
	for _, list := range s.recent {
		for _, each := range list {
			came[each] = true
		}
	}
	s.came, s.until = came, time.Now().Add(repeatedFor)
	if s.subscribe.onGap != nil {
		s.subscribe.onGap(reason)
	}
}

func (s *Subscription) overlap(begins bool) {
	if !begins && len(s.seen) > 0 {
		s.came, s.until = s.seen, time.Now().Add(lateFor)
	}
	s.seen = nil
	if begins {
		s.seen = map[identity]bool{}
	}
}

func (s *Subscription) drop(count uint64) {
	s.conn.mu.Lock()
	s.dropped += count
	s.conn.mu.Unlock()
	if s.subscribe.onDropped != nil {
		s.subscribe.onDropped(count)
	}
}

func (s *Subscription) take(st *gatewayStream, reply *wire.SubscribeReply, held bool) error {
	if len(reply.RevokedRooms)+len(reply.RevokedTopics) > 0 {
		if err := s.revoked(st, reply); err != nil {
			return err
		}
	}
	if reply.Dropped > 0 {
		s.drop(reply.Dropped)
	}
	if time.Now().After(s.until) {
		s.came = nil
	}
	repeated := s.came
	if held && s.seen != nil {
		repeated = s.seen
	}
	var came []identity
	var found []*Message
	size := 0
	for batch := reply.Batch; len(batch) > 0; {
		r, rest, err := codec.Decode(batch)
		batch = rest
		if err != nil {
			continue // damaged: it is left out
		}
		message, err := messageOf(&r)
		if err != nil || !s.subscribe.loadTest.passes(message.LoadTest) {
			continue
		}
		id := identity{message.ID, message.Room}
		if repeated[id] || (message.Signal && !s.isNewSignal(id)) {
			continue
		}
		came, found = append(came, id), append(found, message)
		size += len(message.Payload) + codec.HeaderSize
	}
	if len(found) == 0 {
		return nil
	}
	if s.seen != nil && !held && len(s.seen) < maxOverlap {
		for _, each := range came {
			s.seen[each] = true
		}
	}
	s.recent, s.recently = append(s.recent, came), s.recently+len(came)
	for s.recently > maxRecent && len(s.recent) > 1 {
		s.recently -= len(s.recent[0])
		s.recent = s.recent[1:]
	}
	return s.deliver(found, size)
}

// deliver waits for space: nothing is read meanwhile, and the gateway drops and counts.
func (s *Subscription) deliver(found []*Message, size int) error {
	options := &s.conn.client.options
	for {
		s.conn.mu.Lock()
		full := func(times int) bool {
			return len(s.buffer) > 0 && (s.bytes+size > times*options.ReceiveBytes || len(s.buffer)+len(found) > times*options.ReceiveRecords)
		}
		waited := s.conn.stream != nil && len(s.conn.stream.waiters) > 0
		if waited && full(2) {
			// The goroutine that waits for a confirmation may be the one that should empty the buffer: the oldest go.
			lost := len(s.buffer) / 2
			for _, each := range s.buffer[:lost] {
				s.bytes -= len(each.Payload) + codec.HeaderSize
			}
			s.buffer = s.buffer[lost:]
			s.conn.mu.Unlock()
			s.drop(uint64(lost))
			continue
		}
		if waited || !full(1) {
			s.buffer = append(s.buffer, found...)
			s.bytes += size
			s.conn.notify()
			s.conn.mu.Unlock()
			return nil
		}
		changed := s.conn.changed
		s.conn.mu.Unlock()
		select {
		case <-changed:
		case <-s.conn.ctx.Done():
			return s.conn.ctx.Err()
		}
	}
}

// isNewSignal: the tables of gateways do not know of each other.
func (s *Subscription) isNewSignal(id identity) bool {
	if s.signals[0][id] || s.signals[1][id] {
		return false
	}
	if len(s.signals[0]) >= recentSignals {
		s.signals = [2]map[identity]bool{{}, s.signals[0]}
	}
	s.signals[0][id] = true
	return true
}

// revoked forgets what is no longer allowed: the next gateway is not asked for it.
func (s *Subscription) revoked(st *gatewayStream, reply *wire.SubscribeReply) error {
	s.conn.mu.Lock()
	for _, room := range reply.RevokedRooms {
		delete(s.conn.wanted.rooms, room)
		delete(st.asked.rooms, room)
	}
	for _, topic := range reply.RevokedTopics {
		delete(s.conn.wanted.topics, topic)
		delete(st.asked.topics, topic)
		if topic == "user/"+strconv.FormatUint(s.conn.client.options.UIN, 10) {
			s.subscribe.chat = false
		}
	}
	left := len(s.conn.wanted.rooms)+len(s.conn.wanted.topics) > 0 || s.subscribe.chat
	s.conn.mu.Unlock()
	text := "a permission to subscribe has ended: " + reply.ErrorText
	if !left {
		found := fail(ErrNotAllowed, "%s", text)
		found.finalRefusal = true
		return found
	}
	if s.subscribe.onGap != nil {
		s.subscribe.onGap(text)
	}
	return nil
}

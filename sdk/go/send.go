package pixiu

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"time"
	"unicode/utf8"

	"pixiu/internal/codec"
	wire "pixiu/wire/v1"
)

const (
	typeMask       = 63
	laneNormal     = 64
	maxHeaders     = 64
	maxHeaderName  = 128
	maxTopicLength = 4096
	maxReceivers   = 1000
	maxLifetime    = 65_535
	repeatsFor     = 10 * time.Second // less than gateways remember a message
	sendAgain      = "sending it again may deliver it twice"
)

// outgoing is what send options describe.
type outgoing struct {
	kindOf    byte
	lifetime  time.Duration
	extension []byte
	headers   map[string]string
	first     bool
	level     wire.Level
	to        []uint64
	mark      bool
}

// A SendOption is an option of a message beside its payload.
type SendOption func(*outgoing)

// Headers are texts by name, at most 64, which receivers read as message.Headers().
func Headers(headers map[string]string) SendOption { return func(o *outgoing) { o.headers = headers } }

// Extension is bytes beside the payload, instead of headers: at most 65,535.
func Extension(data []byte) SendOption { return func(o *outgoing) { o.extension = data } }

// Type is a number for the application, 0 to 63.
func Type(number uint8) SendOption { return func(o *outgoing) { o.kindOf = number } }

// FirstLane lets a message overtake those of the normal lane; a mail goes to lane 0.
func FirstLane() SendOption { return func(o *outgoing) { o.first = true } }

// Lifetime after which a message is worth nothing, in whole minutes.
func Lifetime(lifetime time.Duration) SendOption { return func(o *outgoing) { o.lifetime = lifetime } }

// MarkLoadTest marks a message as part of a load test.
func MarkLoadTest() SendOption { return func(o *outgoing) { o.mark = true } }

// AtLevel says how safe a mail is when it is confirmed; default: Replicated.
func AtLevel(level Level) SendOption { return func(o *outgoing) { o.level = wire.Level(level) } }

// Also names further receivers of a mail, at most 1,000 in all; the body is stored once.
func Also(uins ...uint64) SendOption { return func(o *outgoing) { o.to = append(o.to, uins...) } }

// A Level says how safe a write is when it is confirmed.
type Level int32

// Levels, the safest first. The last one is for durable topics only.
const (
	Replicated = Level(wire.Level_REPLICATED) // synced on every replica in sync
	Persisted  = Level(wire.Level_PERSISTED)  // synced on the leader's disk
	Accepted   = Level(wire.Level_ACCEPTED)   // in the leader's log: survives its process
	Stored     = Level(wire.Level_STORED)     // replicated, and in the object store
)

func encodeHeaders(headers map[string]string) ([]byte, error) {
	if len(headers) == 0 {
		return nil, nil
	}
	if len(headers) > maxHeaders {
		return nil, fail(ErrInvalidArgument, "a message has at most %d headers, not %d", maxHeaders, len(headers))
	}
	for name, value := range headers {
		if name == "" || len(name) > maxHeaderName || !utf8.ValidString(name) || !utf8.ValidString(value) {
			return nil, fail(ErrInvalidArgument, "the header %.128q: a name has 1 to %d bytes, and both are UTF-8", name, maxHeaderName)
		}
	}
	data, err := json.Marshal(headers)
	if err != nil || len(data) > codec.MaxExtension {
		return nil, fail(ErrInvalidArgument, "headers have at most %d bytes together", codec.MaxExtension)
	}
	return data, nil
}

// record checks a message and lays it out, without an ID.
func (c *Client) record(kind, flags byte, key uint64, payload []byte, options []SendOption) (*codec.Record, *outgoing, error) {
	o := &outgoing{}
	for _, each := range options {
		each(o)
	}
	extension, err := encodeHeaders(o.headers)
	if err != nil {
		return nil, nil, err
	}
	minutes := (o.lifetime + time.Minute - 1) / time.Minute
	switch {
	case o.kindOf > typeMask:
		return nil, nil, fail(ErrInvalidArgument, "a type is from 0 to %d, not %d", typeMask, o.kindOf)
	case len(o.headers) > 0 && len(o.extension) > 0:
		return nil, nil, fail(ErrInvalidArgument, "a message has headers or an extension, not both: headers are its extension")
	case len(o.extension) > codec.MaxExtension:
		return nil, nil, fail(ErrInvalidArgument, "an extension has at most %d bytes", codec.MaxExtension)
	case minutes < 0 || minutes > maxLifetime:
		return nil, nil, fail(ErrInvalidArgument, "a lifetime is from 0 (no limit) to %d minutes, not %s", maxLifetime, o.lifetime)
	}
	if extension == nil {
		extension = o.extension
	}
	if o.mark {
		flags |= codec.FlagLoadTest
	}
	r := &codec.Record{
		Kind: kind, Flags: flags, Type: o.kindOf | laneNormal, LifetimeMin: uint16(minutes), Key: key, Sender: c.options.UIN,
		Extension: extension, Body: payload,
	}
	if o.first {
		r.Type = o.kindOf
	}
	if size := codec.HeaderSize + len(extension) + len(payload); size > c.options.MaxRecordBytes {
		return nil, nil, fail(ErrRecordTooLarge, "a message of %d bytes, header and extension included, is above the limit of %d; send a "+
			"reference to the content instead", size, c.options.MaxRecordBytes)
	}
	return r, o, nil
}

// A Receipt is that of a message whose sender does not wait.
type Receipt struct {
	sender *sender
	ticket *ticket
}

// Wait waits for the outcome: nil when the cluster has accepted the message.
func (r *Receipt) Wait(ctx context.Context) error { return r.sender.wait(ctx, r.ticket) }

// Done is closed when the outcome is known.
func (r *Receipt) Done() <-chan struct{} { return r.ticket.done }

// MessageID is the message's SnowflakeID.
func (r *Receipt) MessageID() uint64 { return r.ticket.id }

// destination is a room, a free topic, or a user's devices.
type destination struct {
	client      *Client
	kind, flags byte
	key         uint64
	topic       string
	err         error
}

func (d *destination) draft(payload []byte, options []SendOption) (*codec.Record, error) {
	if d.err != nil {
		return nil, d.err
	}
	if d.topic != "" {
		payload = codec.WithTopic(d.topic, payload)
	}
	r, o, err := d.client.record(d.kind, d.flags, d.key, payload, options)
	if err == nil && (len(o.to) > 0 || o.level != 0) {
		err = fail(ErrInvalidArgument, "AtLevel and Also are options of mail")
	}
	return r, err
}

// Send sends a message, and waits until every broker that serves it has it. It is sent again with the same ID while the cluster
// refuses it for now, and for at most ten seconds if it was dropped on the way. Without a deadline of its context it ends after
// Options.PublishTimeout.
func (d *destination) Send(ctx context.Context, payload []byte, options ...SendOption) error {
	r, err := d.draft(payload, options)
	if err != nil {
		return err
	}
	timeout := d.client.options.PublishTimeout
	if at, bounded := ctx.Deadline(); bounded {
		timeout = time.Until(at)
	}
	began, doubtful := time.Now(), false
	for failures := 1; ; failures++ {
		receipt, err := d.queue(ctx, r, timeout-time.Since(began))
		if err == nil {
			if err = receipt.Wait(ctx); err == nil {
				return nil
			}
		}
		why, wait, until := errorOf(err), time.Duration(0), began.Add(timeout)
		if why.Code == "DROPPED" {
			wait = afterFailures(failures, d.client.options.Backoff, d.client.options.MaxBackoff)
			until = began.Add(min(timeout, repeatsFor))
		} else if why.RetryAfter > 0 {
			wait = jittered(why.RetryAfter)
		}
		if wait == 0 || time.Now().Add(wait).After(until) || !pause(ctx, wait) {
			if doubtful {
				return inDoubt(why, sendAgain)
			}
			return why
		}
		doubtful = doubtful || isPerhaps(why.Code)
	}
}

// SendSoon queues a message, waiting only while the queue is full, and gives a receipt for its outcome. Messages of one client to
// one destination leave in the order of the calls.
func (d *destination) SendSoon(ctx context.Context, payload []byte, options ...SendOption) (*Receipt, error) {
	r, err := d.draft(payload, options)
	if err != nil {
		return nil, err
	}
	return d.queue(ctx, r, d.client.options.PublishTimeout)
}

// queue gives a record an ID if it has none, and offers it.
func (d *destination) queue(ctx context.Context, r *codec.Record, timeout time.Duration) (*Receipt, error) {
	s, err := d.client.rooms()
	if err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, fail(ErrNotSent, "the message was not sent: its time was over").by(ctx.Err())
	}
	if r.Snowflake == 0 {
		if r.Snowflake, err = d.client.lease.next(ctx); err != nil {
			return nil, err
		}
	}
	t := newTicket(r.Encode(), r.Key, r.Snowflake, r.Type < laneNormal)
	if err := s.offer(ctx, t, timeout); err != nil {
		return nil, err
	}
	return &Receipt{s, t}, nil
}

// Signal sends a signal: three copies go through three proxies, and it is delivered once, in no order. It returns when a broker
// has a copy.
func (d *destination) Signal(ctx context.Context, payload []byte, options ...SendOption) error {
	_, err := d.signal(ctx, payload, false, options)
	return err
}

// SignalConfirmed sends a signal, and waits until a gateway has delivered it to a client. It returns how many gateways had said so
// by then, 1 or more. Without a confirmation after 200 ms it is sent again with the same ID, three times; then it fails with
// ErrUndelivered.
func (d *destination) SignalConfirmed(ctx context.Context, payload []byte, options ...SendOption) (gateways int, err error) {
	return d.signal(ctx, payload, true, options)
}

func (d *destination) signal(ctx context.Context, payload []byte, confirmed bool, options []SendOption) (int, error) {
	r, err := d.draft(payload, options)
	if err != nil {
		return 0, err
	}
	found, err := d.client.signalling()
	if err != nil {
		return 0, err
	}
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, d.client.options.PublishTimeout)
		defer cancel()
	}
	if r.Snowflake, err = d.client.lease.next(ctx); err != nil {
		return 0, err
	}
	r.Kind = codec.KindSignal
	return found.send(ctx, r, confirmed)
}

// A Room is a room to send to.
type Room struct {
	destination
	ID uint64
}

// Room is a room to send to, 1 to 2^62-1. A wrong number is reported by its methods.
func (c *Client) Room(id uint64) *Room {
	room := &Room{destination{client: c, kind: codec.KindRoom, flags: codec.FlagToRoom, key: id}, id}
	if id == 0 || id > codec.MaxRoom {
		room.err = fail(ErrInvalidArgument, "a RoomID is from 1 to 2^62-1, not %d", id)
	}
	return room
}

// A FreeTopic is a topic to send to that nobody stores.
type FreeTopic struct {
	destination
	Name string
}

// FreeTopic is a free topic to send to, such as "weather/north". A wrong name is reported by its methods.
func (c *Client) FreeTopic(name string) *FreeTopic {
	flags := byte(codec.FlagToRoom | codec.FlagTopic)
	return &FreeTopic{destination{client: c, kind: codec.KindRoom, flags: flags, key: codec.TopicRoom(name), topic: name, err: checkTopic(name)}, name}
}

func checkTopic(name string) error {
	switch {
	case name == "" || strings.Contains(name, "\x00") || !utf8.ValidString(name):
		return fail(ErrInvalidArgument, "a topic has at least one character, no NUL, and is UTF-8")
	case utf8.RuneCountInString(name) > maxTopicLength:
		return fail(ErrInvalidArgument, "a topic has at most %d characters", maxTopicLength)
	case strings.HasPrefix(name, "room/"), strings.HasPrefix(name, "user/"), name[0] == '$':
		return fail(ErrInvalidArgument, "%q: names that begin with room/, user/ or $ are no free topics; use Room and User", name)
	case strings.ContainsAny(name, "+#"):
		return fail(ErrInvalidArgument, "the topic %q has a wildcard; only clients of MQTT have those", name)
	}
	return nil
}

// A User is a user to send to: chat by Send, which reaches devices that are online, and mail, which waits.
type User struct {
	destination
	UIN uint64
}

// User is a user to send to, 1 to 2^63-1. A wrong number is reported by its methods.
func (c *Client) User(uin uint64) *User {
	user := &User{destination{client: c, kind: codec.KindChat, key: uin}, uin}
	if uin == 0 || uin > codec.MaxID {
		user.err = fail(ErrInvalidArgument, "a UIN is from 1 to 2^63-1, not %d", uin)
	}
	return user
}

// A MailReceipt is that of a mail.
type MailReceipt struct {
	Receipt
	record []byte
}

// MsgID is where the mail is stored; 0 while its outcome is not known.
func (r *MailReceipt) MsgID() uint64 {
	select {
	case <-r.ticket.done:
		if len(r.ticket.msgIDs) > 0 {
			return r.ticket.msgIDs[0]
		}
	default:
	}
	return 0
}

// Copies is how many replicas have the mail, at least; 0 while its outcome is not known.
func (r *MailReceipt) Copies() int {
	select {
	case <-r.ticket.done:
		return int(r.ticket.copies)
	default:
		return 0
	}
}

// Mail sends a mail, and waits until it is confirmed. The user's inbox keeps it until it is acknowledged or expires. Without a
// deadline of its context it ends after Options.MailTimeout.
func (u *User) Mail(ctx context.Context, payload []byte, options ...SendOption) (*MailReceipt, error) {
	receipt, err := u.MailSoon(ctx, payload, options...)
	if err != nil {
		return nil, err
	}
	return receipt, receipt.Wait(ctx)
}

// MailSoon queues a mail, waiting only while the queue is full, and gives a receipt for its outcome. All mail of a client is
// stored in the order of the calls.
func (u *User) MailSoon(ctx context.Context, payload []byte, options ...SendOption) (*MailReceipt, error) {
	if u.err != nil {
		return nil, u.err
	}
	r, o, err := u.client.record(codec.KindMail, 0, u.UIN, payload, options)
	if err != nil {
		return nil, err
	}
	var more []uint64
	seen := map[uint64]bool{u.UIN: true}
	for _, each := range o.to {
		if each == 0 || each > codec.MaxID {
			return nil, fail(ErrInvalidArgument, "a UIN is from 1 to 2^63-1, not %d", each)
		}
		if !seen[each] {
			seen[each] = true
			more = append(more, each)
		}
	}
	if len(seen) > maxReceivers {
		return nil, fail(ErrTooManyReceivers, "%d receivers; one mail has at most %d: send several", len(seen), maxReceivers)
	}
	s, err := u.client.mailer()
	if err != nil {
		return nil, err
	}
	if r.Snowflake, err = u.client.lease.next(ctx); err != nil {
		return nil, err
	}
	// One key for all: a stream keeps the order of all lanes and receivers.
	t := newTicket(r.Encode(), 0, r.Snowflake, false)
	t.level, t.more = o.level, more
	t.size += 8 * len(more)
	receipt := &MailReceipt{Receipt{s, t}, t.record}
	return receipt, s.offer(ctx, t, u.client.options.MailTimeout)
}

// ResendMail queues a mail whose outcome is unknown again, under its ID, so that it is stored once.
func (c *Client) ResendMail(ctx context.Context, receipt *MailReceipt) (*MailReceipt, error) {
	before := receipt.ticket
	select {
	case <-before.done:
	default:
		return nil, fail(ErrInvalidArgument, "the mail's outcome is not known yet: wait for it first")
	}
	var why *Error
	if before.err == nil || !errors.As(before.err, &why) {
		return nil, fail(ErrInvalidArgument, "the mail is confirmed")
	}
	s, err := c.mailer()
	if err != nil {
		return nil, err
	}
	t := newTicket(receipt.record, 0, before.id, false)
	t.level, t.more, t.size, t.inDoubt = before.level, before.more, before.size, isPerhaps(why.Code)
	return &MailReceipt{Receipt{s, t}, receipt.record}, s.offer(ctx, t, c.options.MailTimeout)
}

package pixiu

import (
	"context"
	"iter"
	"maps"
	"slices"
	"time"

	"pixiu/internal/codec"
	wire "pixiu/wire/v1"
)

const (
	inboxLanes       = 4
	window           = 64
	maxHeld          = 4 * window
	remembered       = 4096
	acknowledgeAfter = 20 * time.Millisecond
	maxDamaged       = 3
)

// A MailGap is mail of a lane that this device does not get.
type MailGap struct {
	Lane   int
	UpTo   uint64 // InboxSeq; with "dropped" everything up to here that this device did not have yet is missing
	Reason string // "dropped", "gone", "expired" or "damaged"
	MsgID  uint64 // 0: several, or not known
}

// receiving is what inbox options describe.
type receiving struct {
	uin      uint64
	device   string
	onGap    func(MailGap)
	loadTest LoadTest
}

// An InboxOption is an option of an inbox.
type InboxOption func(*receiving)

// OfUser opens the inbox of another user than Options.UIN.
func OfUser(uin uint64) InboxOption { return func(r *receiving) { r.uin = uin } }

// OnMailGap hears, in the mail's order, of mail that this device does not get. It must not block.
func OnMailGap(call func(MailGap)) InboxOption { return func(r *receiving) { r.onGap = call } }

// MailOfLoadTests says what mail of load tests comes. With OnlyLoadTests all other mail is acknowledged: take a device of its own.
func MailOfLoadTests(which LoadTest) InboxOption { return func(r *receiving) { r.loadTest = which } }

// A Mail waits in an inbox until it is acknowledged.
type Mail struct {
	Message
	MsgID       uint64
	Lane        int
	InboxSeq    uint64
	Redelivered bool // it may have been delivered to this device before
	inbox       *Inbox
	key         uint64
	seqs        []uint64
	stream      *gatewayStream
	gap         *MailGap
	done        bool
}

// Ack acknowledges the mail: this device does not get it again. It leaves with others within some milliseconds; Inbox.Flush waits
// for them.
func (m *Mail) Ack() error { return m.inbox.acknowledge(m) }

type lane struct {
	queue   []*Mail
	held    map[uint64]*Mail // by MsgID; gaps by the complement of their InboxSeq
	done    map[uint64]bool
	order   []uint64 // of done
	highest uint64
	left    uint64 // InboxSeq that found no space: nothing follows before it comes again
	leftBy  leftBy
	damaged map[uint64]int
}

type leftBy struct {
	stream  *gatewayStream
	session uint32
}

// An Inbox has the mail of one device of a user: each mail once. One goroutine at a time takes it. Each lane delivers at most 64
// mails ahead of the oldest unacknowledged one.
type Inbox struct {
	conn    *gatewayConn
	options receiving
	number  uint64 // DeviceID

	// Guarded by the connection's lock.
	lanes   [inboxLanes]lane
	due     map[*gatewayStream]map[uint32]map[uint64]bool
	pending int
	wake    chan struct{}
}

// Inbox opens the inbox of a user's device: a name of at most 128 bytes that stays the same, or "" for Options.Device or
// Options.Name. A user has at most eight devices, and each gets all mail. It returns when the cluster delivers to the device.
func (c *Client) Inbox(ctx context.Context, device string, options ...InboxOption) (*Inbox, error) {
	b := &Inbox{
		options: receiving{uin: c.options.UIN, device: device}, due: map[*gatewayStream]map[uint32]map[uint64]bool{},
		wake: make(chan struct{}, 1),
	}
	for _, each := range options {
		each(&b.options)
	}
	for at := range b.lanes {
		b.lanes[at] = lane{held: map[uint64]*Mail{}, done: map[uint64]bool{}, damaged: map[uint64]int{}}
	}
	if device == "" {
		if b.number = c.options.Device; b.number == 0 && !c.named {
			return nil, fail(ErrInvalidArgument, "mail is kept for a device, which needs a name that stays the same")
		}
		if c.named {
			b.options.device = c.name
		}
	}
	if len(device) > maxNameBytes {
		return nil, fail(ErrInvalidArgument, "a device's name has at most %d bytes, this one %d", maxNameBytes, len(device))
	}
	if b.options.uin == 0 || b.options.uin > codec.MaxID {
		return nil, fail(ErrInvalidArgument, "an inbox belongs to a user with a UIN from 1 to 2^63-1: OfUser(…), or Options{UIN: …}")
	}
	b.conn = newGatewayConn(c, "inbox", b.options.device, b)
	b.conn.linger = 0
	if err := b.conn.start(); err != nil {
		return nil, err
	}
	c.tasks.Go(b.send)
	if err := b.conn.settle(ctx); err != nil {
		_ = b.Close()
		return nil, err
	}
	return b, nil
}

// Gateway is the address of the gateway that serves now; empty while there is none.
func (b *Inbox) Gateway() string {
	b.conn.mu.Lock()
	defer b.conn.mu.Unlock()
	if b.conn.stream == nil {
		return ""
	}
	return b.conn.stream.address
}

// Next waits for the next mail, of the first lane that has any.
func (b *Inbox) Next(ctx context.Context) (*Mail, error) {
	for {
		b.conn.mu.Lock()
		if b.conn.closed {
			b.conn.mu.Unlock()
			return nil, fail(ErrNotConnected, "the inbox is closed")
		}
		mail := b.first()
		err, changed := b.conn.err, b.conn.changed
		b.conn.mu.Unlock()
		switch {
		case mail != nil && mail.gap != nil:
			if b.options.onGap != nil {
				b.options.onGap(*mail.gap)
			}
			_ = b.acknowledge(mail) // a closed inbox says so next time
		case mail != nil && !b.options.loadTest.passes(mail.LoadTest):
			_ = b.acknowledge(mail)
		case mail != nil:
			return mail, nil
		case err != nil:
			return nil, err
		default:
			select {
			case <-changed:
			case <-ctx.Done():
				return nil, fail(ErrUnavailable, "no mail came in time").by(ctx.Err())
			}
		}
	}
}

func (b *Inbox) first() *Mail {
	for at := range b.lanes {
		if queue := b.lanes[at].queue; len(queue) > 0 {
			mail := queue[0]
			b.lanes[at].queue = queue[1:]
			if mail.gap == nil && mail.Lifetime > 0 && !mail.SentAt.IsZero() && time.Since(mail.SentAt) > mail.Lifetime {
				mail.gap = &MailGap{mail.Lane, mail.InboxSeq, "expired", mail.MsgID}
			}
			return mail
		}
	}
	return nil
}

// All iterates over mail until the inbox is closed, which ends it, or fails, which is its last value.
func (b *Inbox) All(ctx context.Context) iter.Seq2[*Mail, error] {
	return func(yield func(*Mail, error) bool) {
		for {
			mail, err := b.Next(ctx)
			b.conn.mu.Lock()
			closed := b.conn.closed
			b.conn.mu.Unlock()
			if err != nil && closed {
				return
			}
			if !yield(mail, err) || err != nil {
				return
			}
		}
	}
}

// Run calls a handler with each mail, and acknowledges the mail when the handler has returned nil. It ends when the inbox is
// closed (nil), fails, or the handler does: then that mail is not acknowledged, and comes again to the device's next inbox.
func (b *Inbox) Run(ctx context.Context, handler func(*Mail) error) error {
	for mail, err := range b.All(ctx) {
		if err != nil {
			return err
		}
		if err := handler(mail); err != nil {
			return err
		}
		if err := mail.Ack(); err != nil {
			return err
		}
	}
	return nil
}

// Flush waits until a gateway has all acknowledgements. It passes them on within milliseconds; if it dies before, mail comes again.
func (b *Inbox) Flush(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, b.conn.client.options.JoinTimeout)
	defer cancel()
	w := &waiter{done: make(chan error, 1), lost: fail(ErrOutcomeUnknown,
		"the connection was lost before the gateway confirmed the acknowledgements: what it did not get comes and is acknowledged again")}
	for {
		b.conn.mu.Lock()
		if b.conn.err != nil {
			defer b.conn.mu.Unlock()
			return b.conn.err
		}
		if st := b.conn.stream; st != nil {
			b.sendDue()
			st.acknowledge(nil, w)
			b.conn.mu.Unlock()
			break
		}
		changed := b.conn.changed
		b.conn.mu.Unlock()
		select {
		case <-changed:
		case <-b.conn.over:
			return fail(ErrNotConnected, "the inbox was closed")
		case <-ctx.Done():
			return fail(ErrOutcomeUnknown, "no gateway took the acknowledgements in time").by(ctx.Err())
		}
	}
	select {
	case err := <-w.done:
		return err
	case <-b.conn.over:
		return fail(ErrNotConnected, "the inbox was closed")
	case <-ctx.Done():
		return fail(ErrOutcomeUnknown, "no gateway took the acknowledgements in time").by(ctx.Err())
	}
}

// Close sends the last acknowledgements and stops. Mail that is not acknowledged comes again.
func (b *Inbox) Close() error {
	b.conn.mu.Lock()
	connected, closed := b.conn.stream != nil, b.conn.closed
	b.conn.closed = true
	b.conn.notify()
	b.conn.mu.Unlock()
	if closed {
		<-b.conn.over
		return nil
	}
	var err error
	if connected {
		ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
		err = b.Flush(ctx)
		cancel()
	}
	b.conn.close()
	if b.conn.err == nil {
		b.conn.announce(Closed, "")
	}
	return err
}

func (b *Inbox) source() interface{ Close() error } { return b }

func (b *Inbox) hello() *wire.SubscribeHello {
	return &wire.SubscribeHello{
		Uin: b.options.uin, Client: b.options.device, Mail: true, Device: b.number, DeviceClass: b.conn.client.options.DeviceClass,
	}
}

func (b *Inbox) opened(st *gatewayStream) {
	b.conn.mu.Lock()
	defer b.conn.mu.Unlock()
	b.due[st] = map[uint32]map[uint64]bool{}
}

func (b *Inbox) ended(st *gatewayStream) {
	b.conn.mu.Lock()
	defer b.conn.mu.Unlock()
	delete(b.due, st)
}

func (b *Inbox) lost(string) {}

func (b *Inbox) overlap(bool) {}

func (b *Inbox) take(st *gatewayStream, reply *wire.SubscribeReply, _ bool) error {
	if len(reply.RevokedTopics) > 0 {
		found := fail(ErrNotAllowed, "the permission to read this inbox has ended: %s", reply.ErrorText)
		found.finalRefusal = true
		return found
	}
	b.conn.mu.Lock()
	defer b.conn.mu.Unlock()
	for data := reply.Mail; len(data) > 0; {
		envelope, rest, err := codec.DecodeEnvelope(data)
		if err != nil || !b.arrived(st, &envelope) {
			return fail(ErrMalformed, "mail that gateway %s sent was damaged on the way; it is asked for again", st.address)
		}
		data = rest
	}
	b.conn.notify()
	return nil
}

// arrived takes one mail. false: it is damaged, and another stream sends it again.
func (b *Inbox) arrived(st *gatewayStream, e *codec.Envelope) bool {
	if e.UIN != b.options.uin || int(e.Lane) >= inboxLanes {
		return true
	}
	l, key := &b.lanes[e.Lane], e.MsgID
	if key == 0 {
		key = ^e.Seq
	}
	if held := l.held[key]; held != nil {
		held.stream = st
		if !slices.Contains(held.seqs, e.Seq) {
			held.seqs = append(held.seqs, e.Seq)
		}
		return true
	}
	if l.done[key] || (e.Gap && e.MsgID == 0 && e.Seq <= l.highest) {
		b.acknowledgeTo(st, uint32(e.Lane), e.Seq)
		return true
	}
	by := leftBy{st, e.Session}
	if l.left > 0 && (by != l.leftBy || e.Seq <= l.left) {
		l.left = 0
	}
	if l.left == 0 && len(l.held) >= maxHeld {
		l.left, l.leftBy = e.Seq, by
	}
	if l.left > 0 {
		return true
	}
	mail := &Mail{MsgID: e.MsgID, Lane: int(e.Lane), InboxSeq: e.Seq, Redelivered: e.Again, inbox: b, key: key, seqs: []uint64{e.Seq}, stream: st}
	switch {
	case e.Gap:
		mail.gap = &MailGap{mail.Lane, e.Seq, "dropped", e.MsgID}
		if e.MsgID != 0 {
			mail.gap.Reason = "gone"
		}
	case e.Damaged:
		if l.damaged[key]++; l.damaged[key] <= maxDamaged {
			return false
		}
		mail.gap = &MailGap{mail.Lane, e.Seq, "damaged", e.MsgID}
	default:
		message, err := messageOf(&e.Record)
		if err != nil {
			mail.gap = &MailGap{mail.Lane, e.Seq, "damaged", e.MsgID}
		} else {
			mail.Message = *message
		}
	}
	delete(l.damaged, key)
	l.held[key] = mail
	l.queue = append(l.queue, mail)
	l.highest = max(l.highest, e.Seq)
	return true
}

func (b *Inbox) acknowledge(m *Mail) error {
	b.conn.mu.Lock()
	defer b.conn.mu.Unlock()
	if m.done {
		return nil
	}
	if b.conn.closed {
		return fail(ErrNotConnected, "the inbox is closed: the mail is not acknowledged, and comes again to the device's next inbox")
	}
	m.done = true
	l := &b.lanes[m.Lane]
	delete(l.held, m.key)
	if len(l.order) >= remembered {
		delete(l.done, l.order[0])
		l.order = l.order[1:]
	}
	l.done[m.key] = true
	l.order = append(l.order, m.key)
	for _, seq := range m.seqs {
		b.acknowledgeTo(m.stream, uint32(m.Lane), seq)
	}
	return nil
}

func (b *Inbox) acknowledgeTo(st *gatewayStream, lane uint32, seq uint64) {
	lanes := b.due[st]
	if lanes == nil {
		return // its stream has ended: the mail comes again by another one, and is acknowledged there
	}
	if lanes[lane] == nil {
		lanes[lane] = map[uint64]bool{}
	}
	lanes[lane][seq] = true
	if b.pending++; b.pending >= window/2 {
		b.sendDue() // the relay goes on when half a window is free
	} else {
		signalTo(b.wake)
	}
}

// sendDue sends everything that is acknowledged, as ranges. The lock is held.
func (b *Inbox) sendDue() {
	b.pending = 0
	for st, lanes := range b.due {
		var ranges []*wire.MailAcknowledgement
		for _, number := range slices.Sorted(maps.Keys(lanes)) {
			for _, seq := range slices.Sorted(maps.Keys(lanes[number])) {
				if last := len(ranges) - 1; last >= 0 && ranges[last].Lane == number && ranges[last].Last == seq-1 {
					ranges[last].Last = seq
				} else {
					ranges = append(ranges, &wire.MailAcknowledgement{Lane: number, First: seq, Last: seq})
				}
			}
		}
		if len(ranges) > 0 {
			st.acknowledge(ranges, nil)
			b.due[st] = map[uint32]map[uint64]bool{}
		}
	}
}

// send lets acknowledgements wait a moment for others to leave with.
func (b *Inbox) send() {
	for {
		select {
		case <-b.wake:
		case <-b.conn.ctx.Done():
			return
		}
		if !pause(b.conn.ctx, acknowledgeAfter) {
			return
		}
		b.conn.mu.Lock()
		b.sendDue()
		b.conn.mu.Unlock()
	}
}

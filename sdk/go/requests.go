package pixiu

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
)

const (
	replyTo     = "reply-to"   // the header that names the room for the reply
	requestID   = "request-id" // the header that identifies a request; the reply repeats it
	maxRequests = 10_000       // of a client that wait for their reply
	replyRooms  = 1 << 61      // a client takes a random room below it
)

// replies are those to one client's requests: they are sent to a room of its own, which it joins with the first request.
type replies struct {
	room uint64
	sub  *Subscription
	over chan struct{} // closed when replies no longer arrive

	mu      sync.Mutex
	waiting map[string]chan *Message
}

// Request sends a message, and waits for the first reply that a subscriber sends by Client.Reply. Request and reply are ordinary
// messages: real time, and either may be lost. Without a deadline of its context it ends after Options.PublishTimeout. It fails with
// ErrOutcomeUnknown when no reply came in time.
func (d *destination) Request(ctx context.Context, payload []byte, options ...SendOption) (*Message, error) {
	c := d.client
	if d.err != nil {
		return nil, d.err
	}
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.options.PublishTimeout)
		defer cancel()
	}
	r, err := c.repliesTo(ctx)
	if err != nil {
		return nil, err
	}
	id, reply := randomText(8), make(chan *Message, 1)
	mine := map[string]string{replyTo: "room/" + strconv.FormatUint(r.room, 10), requestID: id}
	if options, err = withHeaders(options, mine, true); err != nil {
		return nil, err
	}
	if err := r.expect(id, reply); err != nil {
		return nil, err
	}
	defer r.forget(id)
	if err := d.Send(ctx, payload, options...); err != nil {
		return nil, err
	}
	select {
	case found := <-reply:
		return found, nil
	case <-r.over:
		return nil, fail(ErrOutcomeUnknown, "the request was accepted, but its reply cannot arrive: the client was closed, or is refused")
	case <-ctx.Done():
		return nil, fail(ErrOutcomeUnknown, "the request was accepted, but nobody replied in time").by(ctx.Err())
	}
}

// Reply answers a request that a subscription of the client received, and waits until the answer is accepted. It fails with
// ErrInvalidArgument if the message asks for no reply.
func (c *Client) Reply(ctx context.Context, message *Message, payload []byte, options ...SendOption) error {
	headers := message.Headers()
	number, isRoom := strings.CutPrefix(headers[replyTo], "room/")
	room, err := strconv.ParseUint(number, 10, 64)
	if !isRoom || err != nil || headers[requestID] == "" {
		return fail(ErrInvalidArgument, "the message asks for no reply: it is not a request")
	}
	if message.LoadTest {
		options = append(options, MarkLoadTest())
	}
	options, err = withHeaders(options, map[string]string{requestID: headers[requestID]}, false)
	if err != nil {
		return err
	}
	return c.Room(room).Send(ctx, payload, options...)
}

// withHeaders adds headers of a request or a reply to those of the application. refuses: the application may not give them.
func withHeaders(options []SendOption, own map[string]string, refuses bool) ([]SendOption, error) {
	var o outgoing
	for _, each := range options {
		each(&o)
	}
	if len(o.extension) > 0 {
		return nil, fail(ErrInvalidArgument, "a request and its reply have headers of their own: give Headers, not Extension")
	}
	headers := map[string]string{}
	for name, value := range o.headers {
		if _, known := own[name]; known && refuses {
			return nil, fail(ErrInvalidArgument, "the headers %q and %q are a request's own", replyTo, requestID)
		}
		headers[name] = value
	}
	maps.Copy(headers, own)
	return append(slices.Clone(options), Headers(headers)), nil
}

// repliesTo joins the client's room for replies.
func (c *Client) repliesTo(ctx context.Context) (*replies, error) {
	r, err := c.openReplies()
	if err != nil {
		return nil, err
	}
	if err := r.sub.conn.settle(ctx); err != nil {
		why := errorOf(err)
		if why.Kind == ErrOutcomeUnknown {
			return nil, fail(ErrNotSent, "the request was not sent: no gateway takes its reply: %s", why.Text).by(ctx.Err())
		}
		return nil, why
	}
	return r, nil
}

func (c *Client) openReplies() (*replies, error) {
	c.asking.Lock()
	defer c.asking.Unlock()
	if r := c.replies; r != nil {
		select {
		case <-r.over:
		default:
			return r, nil
		}
	}
	r := &replies{room: 1 + rand.Uint64N(replyRooms-1), over: make(chan struct{}), waiting: map[string]chan *Message{}}
	var err error
	if r.sub, err = c.subscription(Rooms(r.room), LoadTests(PassLoadTests)); err != nil {
		return nil, err
	}
	c.replies = r
	c.tasks.Go(func() { r.read(c.ctx) })
	return r, nil
}

func (r *replies) read(ctx context.Context) {
	defer close(r.over)
	for message, err := range r.sub.All(ctx) {
		if err != nil {
			return
		}
		r.mu.Lock()
		waiting := r.waiting[message.Headers()[requestID]]
		r.mu.Unlock()
		select {
		case waiting <- message: // the first reply counts
		default:
		}
	}
}

func (r *replies) expect(id string, reply chan *Message) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.waiting) >= maxRequests {
		return fail(ErrOverloaded, "%d requests wait for their replies", maxRequests)
	}
	r.waiting[id] = reply
	return nil
}

func (r *replies) forget(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.waiting, id)
}

package pixiu

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"pixiu/internal/codec"
	wire "pixiu/wire/v1"
)

const (
	askFor      = 5 * time.Second  // one proxy, or leader
	changeFor   = 60 * time.Second // a change to be in effect
	followEvery = 5 * time.Second
	leaderFor   = 20 * time.Second // a change of leaders takes about ten seconds
	maxFollowed = 3
)

// A Part is a contiguous range of a topic's slots, stored together under offsets of its own.
type Part struct {
	Number    uint32
	Low, High int // slots [Low, High)
	Group     uint32
	Parents   []uint32
	Sealed    bool
}

// topicMap is one version of a topic's description.
type topicMap struct {
	name     string
	id       uint32
	version  uint64
	parts    map[uint32]Part
	open     []Part // by their slots
	groups   map[uint32][]string
	channels map[string]*wire.TopicChannel
	deleted  bool
}

func mapOf(found *wire.TopicDescription) *topicMap {
	m := &topicMap{
		name: found.Name, id: found.Topic, version: found.Version, parts: map[uint32]Part{}, groups: map[uint32][]string{},
		channels: map[string]*wire.TopicChannel{}, deleted: found.DeletedAtMs > 0,
	}
	for _, each := range found.Parts {
		if each.State != wire.PartState_PART_OPENING {
			m.parts[each.Number] = partOf(each)
		}
	}
	for _, each := range found.Groups {
		m.groups[each.Group] = each.Addresses
	}
	for _, each := range found.Channels {
		m.channels[each.Name] = each
	}
	m.sort()
	return m
}

func partOf(found *wire.TopicPart) Part {
	sealed := found.State == wire.PartState_PART_SEALED
	return Part{found.Number, int(found.Low), int(found.High), found.Group, found.Parents, sealed}
}

func (m *topicMap) sort() {
	m.open = m.open[:0]
	for _, part := range m.parts {
		if !part.Sealed {
			m.open = append(m.open, part)
		}
	}
	slices.SortFunc(m.open, func(a, b Part) int { return cmp.Compare(a.Low, b.Low) })
}

func (m *topicMap) openPart(slot int) (Part, bool) {
	for _, part := range m.open {
		if part.Low <= slot && slot < part.High {
			return part, true
		}
	}
	return Part{}, false
}

func (m *topicMap) children(number uint32) []Part {
	var found []Part
	for _, part := range m.parts {
		if slices.Contains(part.Parents, number) {
			found = append(found, part)
		}
	}
	return found
}

// followed by these children, which a leader named before a description of the topic has them.
func (m *topicMap) followed(children []Part) *topicMap {
	if len(children) == 0 || m.parts[children[0].Number].Number != 0 {
		return m
	}
	next := *m
	next.parts, next.open = map[uint32]Part{}, nil
	parents := map[uint32]bool{}
	for number, part := range m.parts {
		for _, child := range children {
			if !part.Sealed && part.Low < child.High && child.Low < part.High {
				if number >= child.Number {
					return m // newer than they are
				}
				part.Sealed = true
				parents[number] = true
			}
		}
		next.parts[number] = part
	}
	for _, child := range children {
		child.Sealed, child.Parents = false, nil
		for number := range parents {
			if parent := next.parts[number]; parent.Low < child.High && child.Low < parent.High {
				child.Parents = append(child.Parents, number)
			}
		}
		next.parts[child.Number] = child
	}
	next.sort()
	return &next
}

func errGone(name string) *Error {
	return fail(ErrUnknownTopic, "the topic %s was deleted; `pixiu topic restore %s` brings it back within a day", name, name)
}

func errNoTopic(name, text string) *Error {
	return fail(ErrUnknownTopic, "%s (there is no topic %q: `pixiu topic create %s` makes it, or px.Topics().Create)", text, name, name)
}

// refused is the error of a refusal.
func refused(found *wire.TopicRefusal, name string) *Error {
	if found.Code == "UNKNOWN_TOPIC" || found.Code == "NOT_FOUND" {
		return errNoTopic(name, found.Text)
	}
	e := refusal(found.Code, found.Text, uint64(found.RetryAfterMs))
	e.leader = found.Leader
	return e
}

// callError is the error of a call that failed. atProxies: it was made to a proxy, not to a leader.
func callError(err error, name string, atProxies bool) *Error {
	found, ok := status.FromError(err)
	if !ok {
		return fail(ErrUnavailable, "%s", reasonOf(err)).by(err)
	}
	kind := map[codes.Code]error{
		codes.InvalidArgument: ErrInvalidArgument, codes.AlreadyExists: ErrTopicExists, codes.FailedPrecondition: ErrTopicInUse,
		codes.OutOfRange: ErrLimit, codes.PermissionDenied: ErrNotAllowed, codes.Unauthenticated: ErrNotAuthenticated,
		codes.Unimplemented: ErrNotServed, codes.DeadlineExceeded: ErrOutcomeUnknown, codes.Aborted: ErrOutcomeUnknown,
		codes.Canceled: ErrOutcomeUnknown,
	}[found.Code()]
	switch {
	case found.Code() == codes.NotFound && name != "":
		return errNoTopic(name, found.Message())
	case found.Code() == codes.ResourceExhausted:
		e := fail(ErrOverloaded, "%s", found.Message())
		e.RetryAfter = 200 * time.Millisecond
		return e
	case kind == nil, found.Code() == codes.DeadlineExceeded:
		if found.Code() == codes.DeadlineExceeded && atProxies {
			return fail(ErrOutcomeUnknown, "no answer in time").by(err)
		}
		return fail(ErrUnavailable, "%s", reasonOf(err)).by(err)
	case kind == ErrNotServed:
		return fail(ErrNotServed, "this process serves no durable topics: it is of another role").by(err)
	}
	return fail(kind, "%s", found.Message()).by(err)
}

// isFinal: refusals after which asking another proxy is useless.
func isFinal(e *Error) bool {
	switch e.Kind {
	case ErrInvalidArgument, ErrTopicExists, ErrTopicInUse, ErrNotAllowed, ErrNotAuthenticated, ErrUnknownTopic, ErrLimit:
		return true
	}
	return false
}

// topicDirectory asks proxies where parts are, and keeps that for each topic in use.
type topicDirectory struct {
	client *Client
	mu     sync.Mutex
	topics map[string]*followed
}

type followed struct {
	topic  *topicMap
	users  map[*follower]bool
	wanted chan struct{}
	newer  bool
	cancel context.CancelFunc
}

// follower hears of newer versions of a topic, and of its end. Its calls must not block.
type follower struct {
	onTopic func(*topicMap)
	onEnd   func(*Error)
}

func newTopicDirectory(client *Client) *topicDirectory {
	return &topicDirectory{client: client, topics: map[string]*followed{}}
}

// ask asks one proxy after the other until one answers. changes: a call that one did not answer may be in effect.
func (d *topicDirectory) ask(ctx context.Context, name string, limit time.Duration, changes bool,
	call func(ctx context.Context, stub wire.TopicsClient) (*wire.TopicDescription, error)) (*wire.TopicDescription, error) {
	options := &d.client.options
	deadline := time.Now().Add(max(limit, options.ConnectTimeout))
	for failures := 1; ; failures++ {
		last := fail(ErrUnavailable, "the cluster has no proxy")
		proxies := d.client.directory.current().Proxies
		begin := rand.IntN(max(1, len(proxies)))
		for at := range min(len(proxies), maxTries) {
			if d.client.ctx.Err() != nil {
				return nil, errClosed()
			}
			address := proxies[(begin+at)%len(proxies)]
			bounded, cancel := context.WithTimeout(ctx, min(limit, max(time.Until(deadline), 100*time.Millisecond)))
			connection, login, release, err := d.client.channels.acquire(bounded, address)
			var found *wire.TopicDescription
			if err == nil {
				found, err = call(login, wire.NewTopicsClient(connection))
				release()
			}
			cancel()
			if err == nil {
				return found, nil
			}
			last = callError(err, name, true)
			if isFinal(last) || (changes && last.Kind == ErrOutcomeUnknown) || ctx.Err() != nil {
				return nil, last
			}
			last.Text = address + ": " + last.Text
		}
		wait := afterFailures(failures, options.Backoff, options.MaxBackoff)
		if last.Kind == ErrNotServed || time.Now().Add(wait).After(deadline) || !pause(ctx, wait) {
			return nil, last
		}
	}
}

// describe asks for a topic, or for a newer version of it.
func (d *topicDirectory) describe(ctx context.Context, name string, newerThan uint64) (*topicMap, *wire.TopicDescription, error) {
	found, err := d.ask(ctx, name, askFor, false, func(ctx context.Context, stub wire.TopicsClient) (*wire.TopicDescription, error) {
		return stub.Describe(ctx, &wire.DescribeTopicRequest{Name: name, NewerThan: newerThan})
	})
	if err != nil {
		return nil, nil, err
	}
	m := mapOf(found)
	d.learn(m)
	return m, found, nil
}

func (d *topicDirectory) learn(m *topicMap) {
	d.mu.Lock()
	f := d.topics[m.name]
	var users []*follower
	if f != nil && m.version >= f.topic.version && len(m.groups) > 0 {
		f.topic = m
		for each := range f.users {
			users = append(users, each)
		}
	} else if f != nil && m.version > f.topic.version {
		signalTo(f.wanted) // it came without groups, as an answer to a change
	}
	d.mu.Unlock()
	for _, each := range users {
		each.onTopic(m)
	}
}

// topic is a topic as described last; it is asked for if nobody follows it.
func (d *topicDirectory) topic(ctx context.Context, name string) (*topicMap, error) {
	d.mu.Lock()
	f := d.topics[name]
	d.mu.Unlock()
	if f != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		return f.topic, nil
	}
	m, _, err := d.describe(ctx, name, 0)
	return m, err
}

// follow describes a topic, at least this version of it, and from now on tells the user of newer ones until leave.
func (d *topicDirectory) follow(ctx context.Context, name string, version uint64, user *follower) (*topicMap, error) {
	m, _, err := d.describe(ctx, name, max(version, 1)-1)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	f := d.topics[name]
	if f == nil {
		ctx, cancel := context.WithCancel(d.client.ctx)
		f = &followed{topic: m, users: map[*follower]bool{}, wanted: make(chan struct{}, 1), cancel: cancel}
		d.topics[name] = f
		d.client.tasks.Go(func() { d.keep(ctx, name, f) })
	}
	f.users[user] = true
	return f.topic, nil
}

func (d *topicDirectory) leave(name string, user *follower) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if f := d.topics[name]; f != nil {
		if delete(f.users, user); len(f.users) == 0 {
			delete(d.topics, name)
			f.cancel()
		}
	}
}

// refresh asks again soon. newer: for a newer version, which a proxy waits for a moment.
func (d *topicDirectory) refresh(name string, newer bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if f := d.topics[name]; f != nil {
		f.newer = f.newer || newer
		signalTo(f.wanted)
	}
}

func (d *topicDirectory) keep(ctx context.Context, name string, f *followed) {
	options := &d.client.options
	for failures := 0; ; {
		timer := time.NewTimer(time.Duration(float64(followEvery) * (0.75 + 0.5*rand.Float64())))
		hurry := false
		select {
		case <-f.wanted:
			hurry = true
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
		if ctx.Err() != nil {
			return
		}
		d.mu.Lock()
		known, version := f.topic.version, uint64(0)
		if f.newer {
			version = known
		}
		f.newer = false
		d.mu.Unlock()
		m, _, err := d.describe(ctx, name, version)
		if err != nil {
			why := errorOf(err)
			switch why.Kind {
			case ErrUnknownTopic, ErrNotAllowed, ErrNotAuthenticated, ErrNotServed:
				d.mu.Lock()
				var users []*follower
				for each := range f.users {
					users = append(users, each)
				}
				if d.topics[name] == f {
					delete(d.topics, name)
				}
				d.mu.Unlock()
				for _, each := range users {
					each.onEnd(why)
				}
				f.cancel()
				return
			}
			failures++
			pause(ctx, afterFailures(failures, options.Backoff, options.MaxBackoff))
			continue
		}
		failures = 0
		if hurry && m.version == known {
			pause(ctx, time.Duration(rand.Int64N(int64(options.Backoff)))) // many ask at once
		}
	}
}

// leaderLink is the way to the leader of a group: the one that a refusal names is next, at once; else the next after a back-off.
type leaderLink struct {
	addresses []string
	leader    string
	next      int
	follows   int
	failures  int
	restUntil time.Time
}

func (l *leaderLink) set(addresses []string) {
	if len(addresses) > 0 && !slices.Equal(addresses, l.addresses) {
		l.addresses, l.next = addresses, 0
	}
}

func (l *leaderLink) address() string {
	if l.leader != "" {
		return l.leader
	}
	if len(l.addresses) == 0 {
		return ""
	}
	return l.addresses[l.next%len(l.addresses)]
}

func (l *leaderLink) answered() { l.failures, l.follows = 0, 0 }

func (l *leaderLink) failed(options *Options, longest time.Duration, leader string, after time.Duration) {
	if leader != "" && leader != l.address() && l.follows < maxFollowed {
		l.follows++
		l.leader, l.restUntil = leader, time.Now().Add(after)
		return
	}
	if l.leader == "" {
		l.next++
	}
	l.leader, l.follows = "", 0
	l.failures++
	l.restUntil = time.Now().Add(max(afterFailures(l.failures, options.Backoff, longest), after))
}

// askLeader calls the leader of a group, and looks for it meanwhile.
func askLeader[Reply any](ctx context.Context, c *Client, topic string, group uint32, one, limit time.Duration,
	call func(ctx context.Context, stub wire.TopicLogClient, trailer *metadata.MD) (Reply, *wire.TopicRefusal, error)) (reply Reply, err error) {
	deadline, link := time.Now().Add(limit), leaderLink{}
	why := fail(ErrUnavailable, "no replica of topic group %d is known", group)
	for {
		m, err := c.topicMaps.topic(ctx, topic)
		if err != nil {
			return reply, err
		}
		link.set(m.groups[group])
		address := link.address()
		if address != "" {
			bounded, cancel := context.WithTimeout(ctx, one)
			connection, login, release, err := c.channels.acquire(bounded, address)
			if err != nil {
				cancel()
				return reply, err
			}
			var trailer metadata.MD
			found, refusal, err := call(login, wire.NewTopicLogClient(connection), &trailer)
			release()
			cancel()
			switch {
			case err != nil && status.Code(err) == codes.FailedPrecondition:
				why = fail(ErrUnavailable, "it does not lead")
				if leaders := trailer.Get("pixiu-leader"); len(leaders) > 0 {
					why.leader = leaders[0]
				}
			case err != nil:
				why = callError(err, topic, false)
			case refusal != nil && refusal.Code != "":
				why = refused(refusal, topic)
			default:
				return found, nil
			}
			switch {
			case ctx.Err() != nil:
				return reply, fail(ErrUnavailable, "no leader of topic group %d answered in time", group).by(ctx.Err())
			case why.Code == "NOT_LEADER", why.Kind == ErrUnavailable, why.Kind == ErrOutcomeUnknown, why.Kind == ErrNotSent,
				why.Kind == ErrDraining, why.Kind == ErrOverloaded, why.Kind == ErrTooFewInSync, why.Kind == ErrUnreachable:
			default:
				return reply, why
			}
		}
		link.failed(&c.options, min(c.options.MaxBackoff, time.Second), why.leader, why.RetryAfter)
		if link.restUntil.After(deadline) {
			return reply, fail(ErrUnavailable, "no leader of topic group %d answers: %s: %s", group, address, why.Text)
		}
		c.topicMaps.refresh(topic, false)
		if !pause(ctx, time.Until(link.restUntil)) {
			return reply, fail(ErrUnavailable, "no leader of topic group %d answered in time: %s", group, why.Text).by(ctx.Err())
		}
	}
}

// checkName checks the name of a topic or channel.
func checkName(name, what string) error {
	wrong := func(r rune) bool {
		return !strings.ContainsRune("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-", r)
	}
	if name == "" || len(name) > maxNameBytes || strings.ContainsFunc(name, wrong) {
		return fail(ErrInvalidArgument, "the name of a durable %s is 1 to %d of A-Z a-z 0-9 . _ -, not %q", what, maxNameBytes, name)
	}
	return nil
}

// A TopicMessage is a message of a durable topic.
type TopicMessage struct {
	Topic     string
	Part      uint32
	Offset    uint64
	Time      time.Time // of storing
	Sender    uint64    // UIN of the writer's login; 0: a service
	Slot      int
	Key       []byte // nil: it has none
	Body      []byte
	Headers   map[string][]byte
	EventTime time.Time // zero: not given
	Tag       string
	LoadTest  bool
}

// Position is part and offset, which no other message of the topic has.
func (m *TopicMessage) Position() string { return fmt.Sprintf("%d:%d", m.Part, m.Offset) }

func topicMessage(topic string, part uint32, offset uint64, atUs int64, sender uint64, stored codec.Stored) (*TopicMessage, error) {
	found, err := codec.DecodeTopicMessage(stored)
	if err != nil {
		return nil, fail(ErrMalformed, "a message of topic %s: %v", topic, err)
	}
	m := &TopicMessage{
		Topic: topic, Part: part, Offset: offset, Time: time.UnixMicro(atUs), Sender: sender, Slot: found.Slot, Key: found.Key,
		Body: found.Body, Tag: found.Tag, LoadTest: found.LoadTest,
	}
	if found.EventUs > 0 {
		m.EventTime = time.UnixMicro(found.EventUs)
	}
	if len(found.Headers) > 0 {
		m.Headers = map[string][]byte{}
		for _, each := range found.Headers {
			m.Headers[each.Name] = each.Value
		}
	}
	return m, nil
}

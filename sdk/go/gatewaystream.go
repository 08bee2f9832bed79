package pixiu

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	wire "pixiu/wire/v1"
)

// gatewayStream is one Subscribe stream to one gateway. Its fields without a note are guarded by the connection's lock.
type gatewayStream struct {
	conn        *gatewayConn
	address     string
	ctx         context.Context
	cancel      context.CancelFunc
	replies     chan *wire.SubscribeReply // closed at its end
	greeted     chan struct{}             // closed by the first reply
	ended       chan struct{}             // closed with replies
	why         error                     // of the end, set before `ended` is closed
	pushback    time.Duration
	more        chan struct{}
	tasks       sync.WaitGroup
	asked       names
	requests    map[uint64]names
	lastRequest uint64
	waiters     []*waiter
	outgoing    []*wire.SubscribeRequest
	maxNames    int
	draining    bool
	lacking     bool // a request was refused for now and will be repeated
}

func (g *gatewayConn) connect(address string) *gatewayStream {
	st := &gatewayStream{
		conn: g, address: address, replies: make(chan *wire.SubscribeReply), greeted: make(chan struct{}), ended: make(chan struct{}),
		more: make(chan struct{}, 1), asked: newNames(), requests: map[uint64]names{}, maxNames: maxNames,
	}
	st.ctx, st.cancel = context.WithCancel(g.ctx)
	hello := g.content.hello()
	first := &wire.SubscribeRequest{Hello: hello}
	if hello.Chat || hello.Mail { // answered like a join
		first.Request, st.lastRequest = 1, 1
		st.requests[1] = newNames()
	}
	g.content.opened(st)
	st.tasks.Go(func() { st.run(first) })
	return st
}

func (st *gatewayStream) run(first *wire.SubscribeRequest) {
	defer close(st.ended)
	defer close(st.replies)
	connection, ctx, release, err := st.conn.client.channels.acquire(st.ctx, st.address)
	if err != nil {
		st.why = err
		return
	}
	defer release()
	stream, err := wire.NewSubscriberClient(connection).Subscribe(ctx)
	if err != nil {
		st.why = err
		return
	}
	_ = stream.Send(first) // the reader hears why not
	// Nothing follows the hello before the gateway has answered it.
	st.tasks.Go(func() {
		select {
		case <-st.greeted:
		case <-st.ctx.Done():
			return
		}
		for {
			st.conn.mu.Lock()
			requests := st.outgoing
			st.outgoing = nil
			st.conn.mu.Unlock()
			for _, request := range requests {
				if stream.Send(request) != nil {
					return
				}
			}
			select {
			case <-st.more:
			case <-st.ctx.Done():
				return
			}
		}
	})
	for heard := false; ; {
		reply, err := stream.Recv()
		if err != nil {
			st.why, st.pushback = err, pushback(stream.Trailer())
			return
		}
		if !heard {
			heard = true
			close(st.greeted)
		}
		select {
		case st.replies <- reply:
		case <-st.ctx.Done():
			st.why = st.ctx.Err()
			return
		}
	}
}

// close ends the stream and waits for it.
func (st *gatewayStream) close() {
	st.cancel()
	for range st.replies {
		continue
	}
	st.tasks.Wait()
}

func (st *gatewayStream) settled() bool { return len(st.requests) == 0 }

// reconcile joins what is wanted and was not asked for yet, and leaves what is not wanted.
func (st *gatewayStream) reconcile(wanted names, waiters []*waiter) {
	for _, request := range parts(minus(st.asked, wanted), st.maxNames) {
		st.ask(&wire.SubscribeRequest{LeaveRooms: request.JoinRooms, LeaveTopics: request.JoinTopics}, newNames())
	}
	for _, request := range parts(minus(wanted, st.asked), st.maxNames) {
		joins := newNames()
		for _, room := range request.JoinRooms {
			joins.rooms[room] = true
		}
		for _, topic := range request.JoinTopics {
			joins.topics[topic] = true
		}
		st.ask(request, joins)
	}
	st.asked = wanted.clone()
	for _, w := range waiters {
		// A name that was asked for before may not be confirmed yet: wait for everything that is under way.
		w.waitsFor = map[uint64]bool{}
		for request := range st.requests {
			w.waitsFor[request] = true
		}
		if len(w.waitsFor) == 0 {
			w.done <- nil
		} else {
			st.waiters = append(st.waiters, w)
		}
	}
}

func (st *gatewayStream) ask(request *wire.SubscribeRequest, joins names) {
	st.lastRequest++
	request.Request = st.lastRequest
	st.requests[st.lastRequest] = joins
	st.outgoing = append(st.outgoing, request)
	signalTo(st.more)
}

// acknowledge sends ranges of mail; w waits until the gateway has this and everything before it.
func (st *gatewayStream) acknowledge(ranges []*wire.MailAcknowledgement, w *waiter) {
	for len(ranges) > 0 {
		part := ranges[:min(len(ranges), st.maxNames)]
		ranges = ranges[len(part):]
		st.outgoing = append(st.outgoing, &wire.SubscribeRequest{MailAcknowledgements: part})
	}
	if w != nil {
		st.ask(&wire.SubscribeRequest{}, newNames())
		w.waitsFor = map[uint64]bool{st.lastRequest: true}
		st.waiters = append(st.waiters, w)
	}
	signalTo(st.more)
}

func (st *gatewayStream) confirmed(request uint64) {
	if _, known := st.requests[request]; !known {
		return
	}
	delete(st.requests, request)
	left := st.waiters[:0]
	for _, w := range st.waiters {
		if delete(w.waitsFor, request); len(w.waitsFor) > 0 {
			left = append(left, w)
		} else {
			w.done <- nil
		}
	}
	st.waiters = left
}

// refused takes back a refused request, 0: all. told: somebody who waited for it has the error.
func (st *gatewayStream) refused(reply *wire.SubscribeReply) (asked names, told bool) {
	asked = newNames()
	for request, joins := range st.requests {
		if reply.Request != 0 && request != reply.Request {
			continue
		}
		delete(st.requests, request)
		maps.Copy(asked.rooms, joins.rooms)
		maps.Copy(asked.topics, joins.topics)
		left := st.waiters[:0]
		for _, w := range st.waiters {
			if !w.waitsFor[request] {
				left = append(left, w)
				continue
			}
			w.done <- refusal(reply.ErrorCode, "gateway "+st.address+" refused: "+reply.ErrorText, reply.RetryAfterMs)
			told = true
		}
		st.waiters = left
	}
	for room := range asked.rooms {
		delete(st.asked.rooms, room)
	}
	for topic := range asked.topics {
		delete(st.asked.topics, topic)
	}
	return asked, told
}

func minus(some, others names) names {
	found := newNames()
	for room := range some.rooms {
		if !others.rooms[room] {
			found.rooms[room] = true
		}
	}
	for topic := range some.topics {
		if !others.topics[topic] {
			found.topics[topic] = true
		}
	}
	return found
}

func parts(wanted names, most int) []*wire.SubscribeRequest {
	var found []*wire.SubscribeRequest
	rooms, topics := slices.Sorted(maps.Keys(wanted.rooms)), slices.Sorted(maps.Keys(wanted.topics))
	for len(rooms)+len(topics) > 0 {
		request := &wire.SubscribeRequest{JoinRooms: rooms[:min(len(rooms), most)]}
		rooms = rooms[len(request.JoinRooms):]
		request.JoinTopics = topics[:min(len(topics), most-len(request.JoinRooms))]
		topics = topics[len(request.JoinTopics):]
		found = append(found, request)
	}
	return found
}

package pixiu

import (
	"context"
	"time"

	"google.golang.org/grpc"

	wire "pixiu/wire/v1"
)

// topicCall is a stream to the leader of a group.
type topicCall struct {
	sender   *topicSender
	group    *topicGroup
	address  string
	ctx      context.Context
	cancel   context.CancelFunc
	wake     chan struct{}
	answered chan struct{}
}

func (c *topicCall) run() {
	s := c.sender
	defer c.cancel()
	connection, ctx, release, err := s.client.channels.acquire(c.ctx, c.address)
	if err != nil {
		c.over(reasonOf(err), "", 0)
		return
	}
	defer release()
	stream, err := wire.NewTopicLogClient(connection).Write(ctx)
	if err != nil {
		c.over(reasonOf(err), "", 0)
		return
	}
	_ = stream.Send(&wire.TopicWriteRequest{Client: s.client.name}) // the reader hears why not
	s.client.tasks.Go(func() { c.write(stream) })
	for heard := false; ; heard = true {
		reply, err := stream.Recv()
		if err != nil {
			if !heard && isRefused(err) && c.ctx.Err() == nil {
				s.end(callError(err, s.name, false))
				return
			}
			c.over(reasonOf(err), "", 0)
			return
		}
		s.mu.Lock()
		if c.group.call != c {
			s.mu.Unlock()
			return
		}
		if end := reply.End; end != nil {
			s.mu.Unlock()
			why := refused(end, s.name)
			if why.Kind == ErrNotAllowed || why.Kind == ErrNotAuthenticated {
				s.end(why)
				return
			}
			c.over(why.Code+": "+why.Text, why.leader, why.RetryAfter)
			return
		}
		if !heard {
			c.group.open, c.group.window, c.group.progressAt = true, max(int(reply.WindowBytes), 1), time.Now()
			c.group.link.answered()
			close(c.answered)
		}
		s.results(c, reply.Results)
		if reply.Draining && c.group.call == c {
			c.group.draining = true
			s.client.topicMaps.refresh(s.name, false)
			if c.group.underWay == 0 {
				s.leave(c.group, "", 0)
			}
		}
		signalTo(c.wake)
		s.mu.Unlock()
	}
}

func (c *topicCall) write(stream grpc.BidiStreamingClient[wire.TopicWriteRequest, wire.TopicWriteReply]) {
	select {
	case <-c.answered:
	case <-c.ctx.Done():
		return
	}
	for {
		c.sender.mu.Lock()
		request, lingers := c.sender.next(c)
		c.sender.mu.Unlock()
		if request != nil {
			if stream.Send(request) != nil {
				return // the reader hears why
			}
			continue
		}
		wait := time.Hour
		if lingers {
			wait = lingerFor
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

func (c *topicCall) over(reason, leader string, after time.Duration) {
	s := c.sender
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.group.call == c && s.failed == nil {
		s.lastReason = c.address + ": " + reason
		s.leave(c.group, leader, after)
	}
}

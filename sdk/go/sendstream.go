package pixiu

import (
	"context"
	"sync"

	"google.golang.org/grpc"

	wire "pixiu/wire/v1"
)

// sendStream is one stream to a proxy.
type sendStream struct {
	sender     *sender
	proxy      *proxy
	ctx        context.Context
	cancel     context.CancelFunc
	wake       chan struct{}
	answered   chan struct{}
	ending     sync.Once
	finishing  bool // under the sender's lock
	worker     uint32
	generation uint32
}

// finish ends the client's half once there is nothing more to send. The sender's lock is held.
func (st *sendStream) finish() {
	st.finishing = true
	signalTo(st.wake)
}

func (st *sendStream) run() {
	s, p := st.sender, st.proxy
	connection, ctx, release, err := s.client.channels.acquire(st.ctx, p.address)
	if err != nil {
		st.over(err, false)
		return
	}
	defer release()
	defer st.cancel()
	if s.writer {
		stream, err := wire.NewMailerClient(connection).Send(ctx)
		if err != nil {
			st.over(err, false)
			return
		}
		carry(st, stream, st.mailHello, st.mailRequest, st.mailReply)
		return
	}
	stream, err := wire.NewPublisherClient(connection).Publish(ctx)
	if err != nil {
		st.over(err, false)
		return
	}
	carry(st, stream, st.publishHello, st.publishRequest, st.publishReply)
}

// carry runs a stream from its opening to its end. Nothing leaves after the hello before the first answer: a proxy that refuses
// the stream has taken nothing then.
func carry[Request, Reply any](
	st *sendStream, stream grpc.BidiStreamingClient[Request, Reply], hello func([][]byte) *Request,
	request func([]*ticket, uint64, bool, [][]byte) *Request, take func(*Reply) bool,
) {
	s, shown := st.sender, 0
	if err := stream.Send(hello(s.client.channels.newLoans(&shown))); err == nil {
		s.client.tasks.Go(func() {
			select {
			case <-st.answered:
			case <-st.ctx.Done():
				return
			}
			for {
				s.mu.Lock()
				batch, position, more := s.nextBatch(st)
				finishing := st.finishing
				s.mu.Unlock()
				if batch == nil {
					if finishing {
						_ = stream.CloseSend() // the reader hears how it ends
						return
					}
					select {
					case <-st.wake:
						continue
					case <-st.ctx.Done():
						return
					}
				}
				if stream.Send(request(batch, position, more, s.client.channels.newLoans(&shown))) != nil {
					return // the reader hears why
				}
			}
		})
	}
	heard := false
	for {
		reply, err := stream.Recv()
		if err != nil {
			st.over(err, heard)
			return
		}
		if !heard {
			heard = true
			close(st.answered)
			st.tell(Connected, "")
		}
		if !take(reply) {
			return
		}
	}
}

func (st *sendStream) tell(state ConnectionState, reason string) {
	if st.sender.tell {
		st.sender.client.tell(ConnectionEvent{state, "publisher", st.sender.client, st.proxy.address, reason})
	}
}

func (st *sendStream) over(err error, heard bool) {
	s, reason := st.sender, reasonOf(err)
	if heard && st.ctx.Err() == nil {
		st.tell(Reconnecting, reason)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.died(st, reason, nil, !heard && isLogin(reason))
}

func (st *sendStream) publishHello(loans [][]byte) *wire.PublishRequest {
	return &wire.PublishRequest{Hello: &wire.PublishHello{Client: st.sender.client.name}, Loans: loans}
}

func (st *sendStream) publishRequest(batch []*ticket, position uint64, more bool, loans [][]byte) *wire.PublishRequest {
	s := st.sender
	request := &wire.PublishRequest{
		Batch: joined(batch), Count: uint32(len(batch)), Position: position, More: more, Loans: loans, Copy: s.copy,
	}
	if s.receipt != nil {
		request.Receipt = s.receipt()
	}
	return request
}

func (st *sendStream) publishReply(reply *wire.PublishReply) bool {
	s := st.sender
	if len(reply.Delivered) > 0 && s.delivered != nil {
		s.delivered(reply.Delivered, reply.Gateways)
	}
	var outcomes []outcome
	for _, each := range reply.Failures {
		outcomes = append(outcomes, outcome{
			position: each.First, count: each.Last - each.First + 1, err: refusal(each.Code, each.Text, uint64(each.RetryAfterMs)),
		})
	}
	if reply.Draining {
		st.ending.Do(func() { st.tell(Moved, "the proxy is draining: other proxies take new messages") })
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if reply.WindowBytes > 0 {
		p := st.proxy
		p.window, p.batchBytes, p.batchRecords = min(int(reply.WindowBytes), maxWindow), int(reply.MaxBatchBytes), int(reply.MaxBatchRecords)
	}
	s.reply(st, reply.UpTo, outcomes, reply.Draining)
	return true
}

func (st *sendStream) mailHello(loans [][]byte) *wire.MailRequest {
	hello := &wire.MailHello{Client: st.sender.client.name, Worker: st.worker, Generation: st.generation}
	return &wire.MailRequest{Hello: hello, Loans: loans}
}

func (st *sendStream) mailRequest(batch []*ticket, position uint64, _ bool, loans [][]byte) *wire.MailRequest {
	request := &wire.MailRequest{
		Batch: joined(batch), Count: uint32(len(batch)), Position: position, Level: batch[0].level, Loans: loans,
	}
	for at, t := range batch {
		if len(t.more) > 0 {
			request.More = append(request.More, &wire.MailReceivers{Index: uint32(at), Uins: t.more})
		}
	}
	return request
}

func (st *sendStream) mailReply(reply *wire.MailReply) bool {
	s := st.sender
	var outcomes []outcome
	for _, each := range reply.Results {
		found := outcome{position: each.Position, count: uint64(each.Count), copies: each.Copies, msgIDs: each.MsgIds}
		if each.Code != "" {
			found.err = refusal(each.Code, each.Text, 0)
			found.err.OpenInboxes = each.Open
		}
		outcomes = append(outcomes, found)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if reply.WindowBytes > 0 {
		p := st.proxy
		p.window, p.batchBytes, p.batchRecords = min(int(reply.WindowBytes), maxWindow), int(reply.MaxBatchBytes), int(reply.MaxBatchRecords)
	}
	s.reply(st, 0, outcomes, reply.Draining)
	if end := reply.End; end != nil {
		s.died(st, end.Code+": "+end.Text, refusal(end.Code, end.Text, uint64(end.RetryAfterMs)), false)
		return false
	}
	return true
}

func joined(batch []*ticket) []byte {
	size := 0
	for _, t := range batch {
		size += len(t.record)
	}
	out := make([]byte, 0, size)
	for _, t := range batch {
		out = append(out, t.record...)
	}
	return out
}

package pixiu

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"pixiu/internal/codec"
	wire "pixiu/wire/v1"
)

const (
	renewRetry = 5 * time.Second
	minLeftMs  = 50
	workers    = 1 << 12
	perMs      = 1 << 10
)

// lease holds a SnowflakeID worker number: lent by a proxy, renewed before it ends, given back at the end. Its stream carries
// nothing else, so that it outlives those of messages.
type lease struct {
	client   *Client
	mu       sync.Mutex
	worker   uint32
	fromMs   int64
	untilMs  int64
	lastMs   int64
	sequence uint32
	reason   string
	login    bool
	changed  chan struct{} // closed and replaced when something was lent, or refused
	started  bool
	hurry    chan struct{}
	ending   chan struct{} // closed when the number is to be given back
	ended    chan struct{}
}

func newLease(client *Client) *lease {
	return &lease{client: client, changed: make(chan struct{}), hurry: make(chan struct{}, 1), ending: make(chan struct{}), ended: make(chan struct{})}
}

func (l *lease) number() uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.worker
}

// make makes an ID; false: no number is held now.
func (l *lease) make() (uint64, bool) {
	now := time.Now().UnixMilli()
	at := max(now, l.lastMs, l.fromMs)
	sequence := uint32(0)
	if at == l.lastMs {
		if sequence = l.sequence + 1; sequence == perMs {
			at, sequence = at+1, 0
		}
	}
	if at >= l.untilMs || now > l.untilMs-minLeftMs || at > now+1000 {
		return 0, false
	}
	l.lastMs, l.sequence = at, sequence
	return codec.Snowflake(at, l.worker, sequence), true
}

// next makes the next ID, waiting for a number.
func (l *lease) next(ctx context.Context) (uint64, error) {
	deadline := time.Now().Add(l.client.options.PublishTimeout)
	for {
		l.mu.Lock()
		if !l.started {
			l.started = true
			l.client.tasks.Go(l.hold)
		}
		id, ok := l.make()
		changed, reason, login := l.changed, l.reason, l.login
		l.login = false
		lent := l.untilMs > 0
		l.mu.Unlock()
		if ok {
			return id, nil
		}
		if login {
			return 0, fail(ErrNotAuthenticated, "%s", reason)
		}
		if lent {
			signalTo(l.hurry)
		}
		timer := time.NewTimer(time.Until(deadline))
		select {
		case <-changed:
			timer.Stop()
		case <-timer.C:
			return 0, fail(ErrNotSent, "no proxy lent a worker number for message IDs within %s (%s); check the proxies, and that this "+
				"machine's clock is right", l.client.options.PublishTimeout, reason)
		case <-ctx.Done():
			timer.Stop()
			return 0, fail(ErrNotSent, "no worker number for message IDs was held in time (%s)", reason).by(ctx.Err())
		case <-l.client.ctx.Done():
			timer.Stop()
			return 0, errClosed()
		}
	}
}

// hold keeps a number until the client ends.
func (l *lease) hold() {
	defer close(l.ended)
	ctx, options := l.client.ctx, &l.client.options
	rest, failures, refused := resting{}, 0, ""
	for ctx.Err() == nil {
		proxies := rest.usable(l.client.directory.current().Proxies)
		at := rand.IntN(len(proxies))
		if len(proxies) > 1 && proxies[at] == refused {
			at = (at + 1) % len(proxies)
		}
		address := proxies[at]
		if !pause(ctx, time.Until(rest[address])) {
			return
		}
		lent, wait, err := l.serve(ctx, address)
		select {
		case <-l.ending:
			return
		default:
		}
		rest.refused(address, jittered(wait))
		refused = address
		if failures++; lent {
			failures = 1
		}
		l.mu.Lock()
		if err != nil {
			l.reason = address + ": " + reasonOf(err)
			l.login = strings.HasPrefix(reasonOf(err), "Unauthenticated")
		}
		if l.login {
			close(l.changed)
			l.changed = make(chan struct{})
		}
		l.mu.Unlock()
		pause(ctx, afterFailures(failures, options.Backoff, options.MaxBackoff))
	}
}

// serve holds a number at one proxy until the stream ends or the proxy is leaving.
func (l *lease) serve(ctx context.Context, address string) (lent bool, rest time.Duration, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	connection, ctx, release, err := l.client.channels.acquire(ctx, address)
	if err != nil {
		return false, 0, err
	}
	defer release()
	stream, err := wire.NewPublisherClient(connection).Publish(ctx)
	if err != nil {
		return false, 0, err
	}
	hello := &wire.PublishHello{Client: l.client.name, LendWorker: true}
	l.mu.Lock()
	if l.untilMs > 0 {
		hello.ReturnedWorker, hello.ReturnedUntilMs = l.worker, uint64(l.untilMs)
	}
	l.mu.Unlock()
	if err := stream.Send(&wire.PublishRequest{Hello: hello}); err != nil {
		_, err = stream.Recv()
		return false, pushback(stream.Trailer()), err
	}
	replies := make(chan *wire.PublishReply)
	failed := make(chan error, 1)
	reading := make(chan struct{})
	go func() {
		defer close(reading)
		for {
			reply, err := stream.Recv()
			if err != nil {
				failed <- err
				return
			}
			select {
			case replies <- reply:
			case <-ctx.Done():
				return
			}
		}
	}()
	defer func() { cancel(); <-reading }()
	ending := l.ending
	for {
		timer := time.NewTimer(l.renewAfter())
		select {
		case reply := <-replies:
			timer.Stop()
			lent = l.take(reply) || lent
			if reply.Draining {
				return lent, 0, nil // the number stays ours until its time is over
			}
		case err := <-failed:
			timer.Stop()
			return lent, pushback(stream.Trailer()), err
		case <-timer.C:
			if err := stream.Send(&wire.PublishRequest{RenewWorker: true}); err != nil {
				return lent, 0, err
			}
		case <-l.hurry:
			timer.Stop()
			if err := stream.Send(&wire.PublishRequest{RenewWorker: true}); err != nil {
				return lent, 0, err
			}
		case <-ending:
			timer.Stop()
			ending = nil
			l.mu.Lock()
			last := min(max(l.lastMs, l.fromMs), l.untilMs-1)
			l.mu.Unlock()
			if last <= 0 || stream.Send(&wire.PublishRequest{LastUsedMs: uint64(last)}) != nil || stream.CloseSend() != nil {
				return lent, 0, nil
			}
		case <-ctx.Done():
			timer.Stop()
			return lent, 0, ctx.Err()
		}
	}
}

func (l *lease) renewAfter() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	left := time.Duration(l.untilMs-max(time.Now().UnixMilli(), l.fromMs)) * time.Millisecond
	return max(left/2, min(renewRetry, l.client.options.PublishTimeout/4))
}

func (l *lease) take(reply *wire.PublishReply) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, failure := range reply.Failures {
		l.reason = failure.Code + ": " + failure.Text
	}
	until := int64(reply.WorkerUntilMs)
	if until == 0 || reply.Worker >= workers || reply.WorkerFromMs >= reply.WorkerUntilMs || (reply.Worker == l.worker && until < l.untilMs) {
		return false
	}
	l.client.channels.addLoan(reply.Worker, reply.WorkerFromMs, reply.Loan)
	if reply.Worker != l.worker {
		l.lastMs, l.sequence = 0, 0
	}
	l.worker, l.fromMs, l.untilMs = reply.Worker, int64(reply.WorkerFromMs), until
	close(l.changed)
	l.changed = make(chan struct{})
	return true
}

// close gives the number back, waiting a moment for the proxy to take it.
func (l *lease) close(grace time.Duration) {
	l.mu.Lock()
	started := l.started
	l.started = true
	l.mu.Unlock()
	close(l.ending)
	if !started {
		return
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-l.ended:
	case <-timer.C:
	}
}

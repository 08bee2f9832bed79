package pixiu

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"pixiu/internal/codec"
)

const (
	signalCopies  = 3
	signalAgain   = 200 * time.Millisecond
	signalRepeats = 3
)

// signals sends the copies of signals, each number through a sender of its own.
type signals struct {
	client   *Client
	copies   [signalCopies]*sender
	first    uint64 // copy i goes to the i-th proxy from here
	receipts atomic.Bool

	mu      sync.Mutex
	awaited map[uint64]*awaited
}

type awaited struct {
	gateways []uint64
	changed  chan struct{}
}

func (c *Client) signalling() (*signals, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errClosed()
	}
	if c.signals == nil {
		found := &signals{client: c, first: rand.Uint64N(1 << 20), awaited: map[uint64]*awaited{}}
		for at := range found.copies {
			s := newSender(c, false)
			s.mu.Lock()
			s.copy, s.receipt, s.delivered = uint32(at), found.receipts.Load, found.delivered
			s.mu.Unlock()
			found.copies[at] = s
		}
		c.signals = found
	}
	return c.signals, nil
}

func (g *signals) delivered(ids, gateways []uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for at, id := range ids {
		gateway := uint64(0)
		if at < len(gateways) {
			gateway = gateways[at]
		}
		if found := g.awaited[id]; found != nil && !slices.Contains(found.gateways, gateway) {
			found.gateways = append(found.gateways, gateway)
			signalTo(found.changed)
		}
	}
}

// send sends a signal and waits for its outcome.
func (g *signals) send(ctx context.Context, r *codec.Record, confirmed bool) (int, error) {
	wait := &awaited{changed: make(chan struct{}, 1)}
	if confirmed {
		g.receipts.Store(true)
		g.mu.Lock()
		g.awaited[r.Snowflake] = wait
		g.mu.Unlock()
		defer func() {
			g.mu.Lock()
			delete(g.awaited, r.Snowflake)
			g.mu.Unlock()
		}()
	}
	record, outcomes := r.Encode(), make(chan *ticket, signalCopies*(signalRepeats+1))
	open, accepted := 0, false
	var failed *Error
	copies := func() {
		for at, s := range g.copies {
			t := newTicket(record, g.first+uint64(at), r.Snowflake, r.Type < laneNormal)
			t.onDone = func(t *ticket) { outcomes <- t }
			if err := s.offer(ctx, t, g.client.options.PublishTimeout); err != nil {
				failed = errorOf(err)
			} else {
				open++
			}
		}
	}
	copies()
	again, tries := time.NewTicker(signalAgain), 1
	defer again.Stop()
	for {
		if open == 0 && !accepted && failed != nil &&
			(!confirmed || failed.Code == "INVALID_ARGUMENT" || failed.Code == "RECORD_TOO_LARGE" || failed.Code == "NOT_ALLOWED") {
			return 0, failed
		}
		select {
		case t := <-outcomes:
			open--
			if t.err == nil {
				accepted = true
				if !confirmed {
					return 0, nil
				}
			} else if failed == nil || !isPerhaps(failed.Code) {
				failed = t.err
			}
		case <-wait.changed:
			g.mu.Lock()
			defer g.mu.Unlock()
			return len(wait.gateways), nil
		case <-again.C:
			if !confirmed {
				continue
			}
			if tries > signalRepeats {
				return 0, undelivered(accepted, tries, failed)
			}
			tries++
			copies()
		case <-ctx.Done():
			return 0, fail(ErrOutcomeUnknown, "the outcome of the signal is not known in time").by(ctx.Err())
		case <-g.client.ctx.Done():
			return 0, fail(ErrOutcomeUnknown, "the client was closed before the outcome of the signal was known")
		}
	}
}

func undelivered(accepted bool, tries int, failed *Error) *Error {
	why := "no broker confirmed it"
	if accepted {
		why = "brokers have it"
	} else if failed != nil {
		why += " (" + failed.Text + ")"
	}
	return fail(ErrUndelivered, "no gateway confirmed the signal, sent %d times in %s; %s. Perhaps the room is empty; the outcome is "+
		"unknown, and sending it again may deliver it twice", tries, time.Duration(tries)*signalAgain, why)
}

func (g *signals) close() {
	for _, each := range g.copies {
		each.close()
	}
}

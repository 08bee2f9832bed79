package pixiu

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	retryJitter = 0.25
	proven      = 10 * time.Second // a connection that lived so long counts as a success
)

// afterFailures is the wait after failures in a row: it doubles up to longest, and is shortened by up to a half at random.
func afterFailures(failures int, first, longest time.Duration) time.Duration {
	wait := longest
	if failures < 32 && first<<max(failures-1, 0) < longest {
		wait = first << max(failures-1, 0)
	}
	return time.Duration(float64(wait) * (0.5 + 0.5*rand.Float64()))
}

// jittered is the wait that a server named, extended at random so that clients refused together come one by one.
func jittered(named time.Duration) time.Duration {
	return time.Duration(float64(named) * (1 + retryJitter*rand.Float64()))
}

// pause waits; false: the context is over.
func pause(ctx context.Context, wait time.Duration) bool {
	if wait <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// signalTo wakes whoever waits on a channel with one place.
func signalTo(wake chan struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

// resting has addresses of servers that asked to be left alone for a time.
type resting map[string]time.Time

func (r resting) refused(address string, wait time.Duration) {
	if wait > 0 {
		r[address] = time.Now().Add(wait)
	} else {
		delete(r, address)
	}
}

// usable are the addresses that may be used now; if there are none, the one that may be used first.
func (r resting) usable(addresses []string) []string {
	var found []string
	first := ""
	for _, each := range addresses {
		if time.Until(r[each]) <= 0 {
			found = append(found, each)
		}
		if first == "" || r[each].Before(r[first]) {
			first = each
		}
	}
	if len(found) == 0 && first != "" {
		found = []string{first}
	}
	return found
}

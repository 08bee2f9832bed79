package pixiu

import (
	"context"
	"crypto/tls"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
)

const (
	maxUsers    = 24 // of one connection: a listener for clients takes 32 calls at a time of each
	maxLoans    = 16
	maxPushback = time.Minute
)

type shared struct {
	connection *grpc.ClientConn
	address    string
	users      int
}

// channels shares connections by address; the last user of one closes it.
type channels struct {
	authorization func() (string, error)
	tls           *tls.Config

	mu     sync.Mutex
	newest map[string]*shared
	closed bool
	loans  []loan
	loaned int // rises with each new proof
}

type loan struct {
	worker uint32
	fromMs uint64
	proof  []byte
}

func newChannels(authorization func() (string, error), config *tls.Config) *channels {
	return &channels{authorization: authorization, tls: config, newest: map[string]*shared{}}
}

// acquire returns a connection and what releases it. The context carries the login.
func (c *channels) acquire(ctx context.Context, address string) (*grpc.ClientConn, context.Context, func(), error) {
	said, err := c.authorization()
	if err != nil {
		return nil, nil, nil, err
	}
	if said != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", said)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, nil, nil, fail(ErrNotConnected, "the client is closed")
	}
	found := c.newest[address]
	if found == nil || found.users >= maxUsers {
		connection, err := c.dial(address)
		if err != nil {
			return nil, nil, nil, err
		}
		found = &shared{connection: connection, address: address}
		c.newest[address] = found
	}
	found.users++
	return found.connection, ctx, func() { c.release(found) }, nil
}

func (c *channels) dial(address string) (*grpc.ClientConn, error) {
	security := insecure.NewCredentials()
	if c.tls != nil {
		security = credentials.NewTLS(c.tls.Clone())
	}
	return grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(security),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(messageBytes), grpc.MaxCallSendMsgSize(messageBytes)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 5 * time.Second}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		}),
		grpc.WithDisableRetry(), grpc.WithIdleTimeout(0),
	)
}

func (c *channels) release(found *shared) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if found.users--; found.users == 0 {
		if c.newest[found.address] == found {
			delete(c.newest, found.address)
		}
		_ = found.connection.Close() // it may be closed already
	}
}

func (c *channels) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, each := range c.newest {
		_ = each.connection.Close()
	}
}

// addLoan keeps the proof of a number that was lent or extended.
func (c *channels) addLoan(worker uint32, fromMs uint64, proof []byte) {
	if len(proof) == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	kept := c.loans[:0:0]
	for _, each := range c.loans {
		if each.worker != worker || each.fromMs != fromMs {
			kept = append(kept, each)
		}
	}
	if len(kept) >= maxLoans {
		kept = kept[1:]
	}
	c.loans = append(kept, loan{worker, fromMs, proof})
	c.loaned++
}

// newLoans are all proofs if there is one that a stream has not shown.
func (c *channels) newLoans(shown *int) [][]byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	if *shown == c.loaned {
		return nil
	}
	*shown = c.loaned
	var found [][]byte
	for _, each := range c.loans {
		found = append(found, each.proof)
	}
	return found
}

// pushback is the time for which a server asks to be left alone.
func pushback(trailer metadata.MD) time.Duration {
	for _, value := range trailer.Get("grpc-retry-pushback-ms") {
		if ms, err := strconv.ParseUint(value, 10, 31); err == nil {
			return min(time.Duration(ms)*time.Millisecond, maxPushback)
		}
	}
	return 0
}

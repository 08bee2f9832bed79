package pixiu

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/status"

	wire "pixiu/wire/v1"
)

const closeGrace = time.Second // for the other side to take the end of a stream

// A Client is a connection to a cluster. Its methods may be called by several goroutines.
type Client struct {
	options   Options
	name      string
	named     bool
	ctx       context.Context // ends with Close
	cancel    context.CancelFunc
	tasks     sync.WaitGroup
	channels  *channels
	directory *directory
	lease     *lease
	topicMaps *topicDirectory

	mu        sync.Mutex
	closed    bool
	publisher *sender
	mails     *sender
	signals   *signals
	receivers map[interface{ Close() error }]struct{}
	writers   map[string]*topicSender   // of topics
	loaders   map[*topicSender]struct{} // writers with a name

	asking  sync.Mutex
	replies *replies
}

// Connect connects to a cluster: "host:port,host:port" names the gRPC addresses of any proxies, "zk://host:port/root" its registry.
// An empty target is the environment variable PIXIU_TARGET.
func Connect(ctx context.Context, target string) (*Client, error) {
	return ConnectWith(ctx, target, Options{})
}

// ConnectWith is Connect with options.
func ConnectWith(ctx context.Context, target string, options Options) (*Client, error) {
	if target == "" {
		if target = os.Getenv("PIXIU_TARGET"); target == "" {
			return nil, fail(ErrConfiguration, "no target: Connect(ctx, \"host:port\"), or set PIXIU_TARGET to the addresses of proxies")
		}
	}
	place, err := parseTarget(target)
	if err != nil {
		return nil, err
	}
	if options, err = options.checked(); err != nil {
		return nil, err
	}
	config, err := options.tlsConfig()
	if err != nil {
		return nil, err
	}
	c := &Client{
		options: options, name: options.Name, named: options.Name != "", channels: newChannels(options.authorization(), config),
		receivers: map[interface{ Close() error }]struct{}{}, writers: map[string]*topicSender{},
		loaders: map[*topicSender]struct{}{},
	}
	if c.name == "" {
		host, _ := os.Hostname() // without a name the rest tells clients apart
		c.name = fmt.Sprintf("%.64s-%d-%s", host, os.Getpid(), randomText(4))
	}
	if place.registry {
		c.directory, err = openRegistry(ctx, place, &c.options, config)
	} else {
		c.directory, err = openProxies(ctx, place.addresses, &c.options, c.channels)
	}
	if err != nil {
		c.channels.close()
		return nil, err
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.lease = newLease(c)
	c.topicMaps = newTopicDirectory(c)
	c.directory.mu.Lock()
	c.directory.onChange = c.onMap
	c.directory.mu.Unlock()
	c.tasks.Go(func() { c.directory.watch(c.ctx) })
	return c, nil
}

func randomText(bytes int) string {
	random := make([]byte, bytes)
	_, _ = rand.Read(random) // it never fails
	return hex.EncodeToString(random)
}

func errClosed() *Error { return fail(ErrNotConnected, "the client is closed") }

// Name is the client's name in logs and metrics of the cluster.
func (c *Client) Name() string { return c.name }

// Cluster is what the client knows of the cluster now.
func (c *Client) Cluster() ClusterMap { return c.directory.current() }

func (c *Client) onMap() {
	proxies := c.directory.current().Proxies
	c.mu.Lock()
	senders := []*sender{c.publisher, c.mails}
	if c.signals != nil {
		senders = append(senders, c.signals.copies[:]...)
	}
	c.mu.Unlock()
	for _, each := range senders {
		if each != nil {
			each.setProxies(proxies)
		}
	}
}

func (c *Client) tell(event ConnectionEvent) {
	if c.options.OnConnection != nil {
		c.options.OnConnection(event)
	}
}

func (c *Client) rooms() (*sender, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errClosed()
	}
	if c.publisher == nil {
		c.publisher = newSender(c, false)
		c.publisher.mu.Lock()
		c.publisher.tell = true
		c.publisher.mu.Unlock()
	}
	return c.publisher, nil
}

func (c *Client) mailer() (*sender, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errClosed()
	}
	if c.mails == nil {
		c.mails = newSender(c, true)
	}
	return c.mails, nil
}

func (c *Client) add(receiver interface{ Close() error }) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errClosed()
	}
	c.receivers[receiver] = struct{}{}
	return nil
}

func (c *Client) forget(receiver interface{ Close() error }) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.receivers, receiver)
}

// Flush waits until every message and mail sent so far is confirmed or has failed.
func (c *Client) Flush(ctx context.Context) error {
	c.mu.Lock()
	senders, topics := []*sender{c.publisher, c.mails}, slices.AppendSeq(slices.Collect(maps.Values(c.writers)), maps.Keys(c.loaders))
	c.mu.Unlock()
	for _, each := range senders {
		if each != nil {
			if err := each.idle(ctx); err != nil {
				return err
			}
		}
	}
	for _, each := range topics {
		if err := each.idle(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Close waits until everything sent is resolved, each kind at most for its time-out, then disconnects. Subscriptions, inboxes,
// readers and members end. No goroutine of the client is left when it returns.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	receivers := make([]interface{ Close() error }, 0, len(c.receivers))
	for each := range c.receivers {
		receivers = append(receivers, each)
	}
	c.mu.Unlock()
	for _, each := range receivers {
		_ = each.Close()
	}
	limit, cancel := context.WithTimeout(context.Background(), max(c.options.PublishTimeout, c.options.MailTimeout, c.options.TopicTimeout))
	err := c.Flush(limit)
	cancel()
	for _, each := range []*sender{c.publisher, c.mails} {
		if each != nil {
			each.close()
		}
	}
	c.mu.Lock()
	topics := slices.AppendSeq(slices.Collect(maps.Values(c.writers)), maps.Keys(c.loaders))
	c.mu.Unlock()
	for _, each := range topics {
		each.end(errClosed())
	}
	if c.signals != nil {
		c.signals.close()
	}
	c.lease.close(closeGrace)
	c.cancel()
	c.directory.closing()
	c.tasks.Wait()
	c.channels.close()
	c.tell(ConnectionEvent{State: Closed, What: "publisher", Source: c})
	return err
}

// A UserPresence says on how many devices a user is online; 0: the user is offline.
type UserPresence struct {
	UIN     uint64
	Devices int
}

// Online: at least one device is connected.
func (u UserPresence) Online() bool { return u.Devices > 0 }

const (
	maxUINs     = 1000
	presenceTry = 3
)

// Presence asks who is online, in the order of uins.
func (c *Client) Presence(ctx context.Context, uins ...uint64) ([]UserPresence, error) {
	if c.ctx.Err() != nil {
		return nil, errClosed()
	}
	var found []UserPresence
	for len(uins) > 0 {
		part := uins[:min(len(uins), maxUINs)]
		uins = uins[len(part):]
		for _, uin := range part {
			if uin == 0 || uin >= 1<<63 {
				return nil, fail(ErrInvalidArgument, "a UIN is from 1 to 2^63-1, not %d", uin)
			}
		}
		reply, err := c.presence(ctx, part)
		if err != nil {
			return nil, err
		}
		for _, user := range reply.Users {
			found = append(found, UserPresence{user.Uin, int(user.Devices)})
		}
	}
	return found, nil
}

func (c *Client) presence(ctx context.Context, uins []uint64) (*wire.PresenceReply, error) {
	text := "the cluster has no proxy"
	for at, address := range c.directory.current().Proxies {
		if at == presenceTry {
			break
		}
		bounded, cancel := context.WithTimeout(ctx, c.options.ConnectTimeout)
		connection, call, release, err := c.channels.acquire(bounded, address)
		if err == nil {
			var reply *wire.PresenceReply
			reply, err = wire.NewPresenceClient(connection).Query(call, &wire.PresenceRequest{Uins: uins})
			release()
			if err == nil {
				cancel()
				return reply, nil
			}
		}
		cancel()
		text = address + ": " + reasonOf(err)
		if _, ok := status.FromError(err); ok && isRefused(err) {
			break
		}
	}
	return nil, fail(ErrUnavailable, "no proxy could answer who is online (%s); try again", text).by(ctx.Err())
}

package pixiu

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"

	wire "pixiu/wire/v1"
)

// A ClusterMap is what a client knows of the cluster.
type ClusterMap struct {
	Proxies, Gateways []string // host:port of their ports for clients
	ID                string   // of the cluster, 16 hex digits; empty: not known
}

const (
	fetchTimeout    = 2 * time.Second
	minRefresh      = time.Second
	maxTries        = 8
	credentialsFile = "PIXIU_CLUSTER_REGISTRY_CREDENTIALS_FILE"
)

// directory keeps the cluster's map, from proxies or from the registry.
type directory struct {
	mu       sync.Mutex
	known    ClusterMap
	onChange func()
	wanted   chan struct{}
	watch    func(ctx context.Context)
	closing  func()
}

func (d *directory) current() ClusterMap {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.known
}

// refresh looks again soon, because something failed.
func (d *directory) refresh() { signalTo(d.wanted) }

func (d *directory) learn(found ClusterMap) {
	d.mu.Lock()
	if len(found.Proxies) == 0 {
		found.Proxies = d.known.Proxies // all are gone for a moment: keep the last ones to try
	}
	if found.ID == "" {
		found.ID = d.known.ID
	}
	same := slices.Equal(found.Proxies, d.known.Proxies) && slices.Equal(found.Gateways, d.known.Gateways) && found.ID == d.known.ID
	d.known = found
	d.mu.Unlock()
	if !same && d.onChange != nil {
		d.onChange()
	}
}

// openProxies asks proxies until one answers.
func openProxies(ctx context.Context, seeds []string, options *Options, channels *channels) (*directory, error) {
	d := &directory{known: ClusterMap{Proxies: seeds}, wanted: make(chan struct{}, 1), closing: func() {}}
	ask := func(ctx context.Context) (failures []string, err error) {
		known := d.current().Proxies
		begin := rand.IntN(len(known))
		addresses := append(append(slices.Clone(known[begin:]), known[:begin]...), seeds...)
		asked := map[string]bool{}
		for _, address := range addresses {
			if asked[address] || len(asked) >= maxTries {
				continue
			}
			asked[address] = true
			reply, err := fetchMap(ctx, address, channels)
			if err == nil {
				d.learn(*reply)
				return nil, nil
			}
			if strings.HasPrefix(reasonOf(err), "Unauthenticated") {
				return nil, fail(ErrNotAuthenticated, "%s", reasonOf(err)).by(err)
			}
			failures = append(failures, address+": "+reasonOf(err))
		}
		return failures, nil
	}
	deadline := time.Now().Add(options.ConnectTimeout)
	for {
		bounded, cancel := context.WithDeadline(ctx, deadline)
		failures, err := ask(bounded)
		cancel()
		if err != nil {
			return nil, err
		}
		if failures == nil {
			break
		}
		if time.Now().Add(options.Backoff).After(deadline) || !pause(ctx, options.Backoff) {
			return nil, fail(ErrUnreachable, "no proxy answered within %s (%s). Start a cluster (`pixiu up`), or give the gRPC addresses "+
				"of its proxies", options.ConnectTimeout, strings.Join(failures, "; ")).by(ctx.Err())
		}
	}
	d.watch = func(ctx context.Context) {
		for {
			timer := time.NewTimer(options.RefreshInterval)
			select {
			case <-ctx.Done():
				timer.Stop()
				return
			case <-d.wanted:
				pause(ctx, time.Duration(rand.Int64N(int64(minRefresh))))
			case <-timer.C:
			}
			timer.Stop()
			failures, err := ask(ctx)
			pause(ctx, minRefresh)
			if failures != nil || err != nil {
				d.refresh()
			}
		}
	}
	return d, nil
}

func fetchMap(ctx context.Context, address string, channels *channels) (*ClusterMap, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	connection, ctx, release, err := channels.acquire(ctx, address)
	if err != nil {
		return nil, err
	}
	defer release()
	reply, err := wire.NewPublisherClient(connection).Cluster(ctx, &wire.ClusterRequest{})
	if err != nil {
		return nil, err
	}
	found := &ClusterMap{ID: reply.Cluster}
	for _, member := range reply.Members {
		switch {
		case member.GrpcAddress == "":
		case member.Role == "proxy" && !slices.Contains(found.Proxies, member.GrpcAddress):
			found.Proxies = append(found.Proxies, member.GrpcAddress)
		case member.Role == "gateway" && !slices.Contains(found.Gateways, member.GrpcAddress):
			found.Gateways = append(found.Gateways, member.GrpcAddress)
		}
	}
	return found, nil
}

type quietLog struct{}

func (quietLog) Printf(string, ...any) {}

// openRegistry reads the registry in ZooKeeper, by watch and by poll. It writes nothing.
func openRegistry(ctx context.Context, place target, options *Options, config *tls.Config) (*directory, error) {
	dial := net.DialTimeout
	if place.tls {
		if config == nil {
			config = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		dial = func(network, address string, timeout time.Duration) (net.Conn, error) {
			return tls.DialWithDialer(&net.Dialer{Timeout: timeout}, network, address, config)
		}
	}
	session, events, err := zk.Connect(place.addresses, 10*time.Second, zk.WithDialer(dial), zk.WithLogger(quietLog{}))
	if err != nil {
		return nil, fail(ErrRegistryUnavailable, "ZooKeeper at %s: %v", strings.Join(place.addresses, ","), err).by(err)
	}
	d := &directory{wanted: make(chan struct{}, 1), closing: session.Close}
	opening, cancel := context.WithTimeout(ctx, options.ConnectTimeout)
	defer cancel()
	logins, err := registryLogins(strings.Join(place.addresses, ","))
	for _, each := range logins {
		if err == nil {
			err = session.AddAuth("digest", []byte(each))
		}
	}
	if err != nil {
		session.Close()
		return nil, fail(ErrRegistryUnavailable, "the registry's login: %v", err).by(err)
	}
	for failures := 1; ; failures++ {
		if err = within(opening, func() error { return d.read(session, place.root) }); err == nil && len(d.current().Proxies) > 0 {
			break
		}
		if !pause(opening, afterFailures(failures, options.Backoff, time.Second)) {
			session.Close()
			if err == nil {
				return nil, fail(ErrUnreachable, "ZooKeeper at %s answers, but no Running proxy is registered below %s; start one, or "+
					"check the root in the target", strings.Join(place.addresses, ","), place.root).by(ctx.Err())
			}
			return nil, fail(ErrRegistryUnavailable, "ZooKeeper at %s: %v", strings.Join(place.addresses, ","), err).by(err)
		}
	}
	d.watch = func(ctx context.Context) {
		var proxies, gateways <-chan zk.Event // each change of a node is followed by a write of the role's marker
		for ctx.Err() == nil {
			wait := options.RefreshInterval
			for role, marker := range map[string]*<-chan zk.Event{"proxy": &proxies, "gateway": &gateways} {
				if *marker == nil {
					if _, _, *marker, err = session.ExistsW(path.Join(place.root, role, "changes")); err != nil {
						*marker, wait = nil, time.Second
					}
				}
			}
			if d.read(session, place.root) != nil {
				wait = time.Second
			}
			timer := time.NewTimer(wait)
			select {
			case <-ctx.Done():
				timer.Stop()
				return
			case <-proxies:
				proxies = nil
			case <-gateways:
				gateways = nil
			case <-events: // the session came back, or is gone
			case <-d.wanted:
				pause(ctx, minRefresh)
			case <-timer.C:
			}
			timer.Stop()
		}
	}
	return d, nil
}

// within runs a call that takes no context.
func within(ctx context.Context, call func() error) error {
	done := make(chan error, 1)
	go func() { done <- call() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return errors.New("no server answers")
	}
}

func (d *directory) read(session *zk.Conn, root string) error {
	var found ClusterMap
	for role, list := range map[string]*[]string{"proxy": &found.Proxies, "gateway": &found.Gateways} {
		names, _, err := session.Children(path.Join(root, role))
		if errors.Is(err, zk.ErrNoNode) {
			continue
		}
		if err != nil {
			return err
		}
		slices.Sort(names)
		for _, name := range names {
			if len(name) != 11 || name[0] != 'n' {
				continue
			}
			data, _, err := session.Get(path.Join(root, role, name))
			if errors.Is(err, zk.ErrNoNode) {
				continue
			}
			if err != nil {
				return err
			}
			if address := nodeAddress(data, role); address != "" && !slices.Contains(*list, address) {
				*list = append(*list, address)
			}
		}
	}
	if data, _, err := session.Get(path.Join(root, "layout")); err == nil {
		var layout struct{ Cluster string }
		if json.Unmarshal(data, &layout) == nil {
			found.ID = layout.Cluster
		}
	}
	d.learn(found)
	return nil
}

// nodeAddress is the port for clients of a Running process; empty: it serves none.
func nodeAddress(data []byte, role string) string {
	var node struct {
		Role, State, Host string
		ClientHost        string `json:"client_host"`
		ClientPort        int    `json:"client_port"`
	}
	if json.Unmarshal(data, &node) != nil || node.Role != role || node.State != "Running" || node.ClientPort == 0 {
		return ""
	}
	if node.ClientHost == "" {
		node.ClientHost = node.Host
	}
	return net.JoinHostPort(node.ClientHost, strconv.Itoa(node.ClientPort))
}

// registryLogins are "role:password" of the file that the environment names, or that an embedded ZooKeeper of this user left.
func registryLogins(hosts string) ([]string, error) {
	place := os.Getenv(credentialsFile)
	if place == "" {
		folder := path.Join(os.TempDir(), fmt.Sprintf("pixiu-%d", os.Getuid()))
		if given := os.Getenv("XDG_RUNTIME_DIR"); given != "" {
			folder = path.Join(given, "pixiu")
		}
		place = path.Join(folder, "registry-"+hosts)
		if _, err := os.Stat(place); err != nil {
			return nil, nil
		}
	}
	file, err := os.Open(place)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	if info, err := file.Stat(); err != nil || info.Mode()&0o077 != 0 {
		return nil, fmt.Errorf("%s: others may read or change it: chmod 600 %s", place, place)
	}
	var found []string
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if words := strings.Fields(lines.Text()); len(words) == 2 && !strings.HasPrefix(words[0], "#") {
			found = append(found, words[0]+":"+words[1])
		}
	}
	return found, nil
}

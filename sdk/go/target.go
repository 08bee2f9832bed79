package pixiu

import (
	"net"
	"regexp"
	"strconv"
	"strings"
)

// target is some proxies, or ZooKeeper servers with a root.
type target struct {
	addresses []string
	registry  bool
	tls       bool
	root      string
}

var rootForm = regexp.MustCompile(`^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$`)

const (
	maxAddresses  = 64
	maxHosts      = 9
	maxRootLength = 256
)

// parseTarget reads "host:port,host:port" (proxies), "zk://host:port,host:port/root", or by TLS "zks://…".
func parseTarget(text string) (target, error) {
	scheme, rest, found := strings.Cut(text, "://")
	if !found {
		addresses, err := addressesOf(text, text, "", maxAddresses)
		return target{addresses: addresses}, err
	}
	if scheme != "zk" && scheme != "zks" {
		return target{}, fail(ErrInvalidArgument,
			"the target %q has an unknown scheme; write \"host:port,host:port\" or \"zk://host:port/root\"", text)
	}
	hosts, root, _ := strings.Cut(rest, "/")
	root = "/" + strings.TrimRight(root, "/")
	if root == "/" {
		root = "/pubsub"
	}
	if !rootForm.MatchString(root) || len(root) > maxRootLength {
		return target{}, fail(ErrInvalidArgument, "the registry's root %q must look like /pubsub or /team/pubsub", root)
	}
	addresses, err := addressesOf(hosts, text, "2181", maxHosts)
	return target{addresses, true, scheme == "zks", root}, err
}

func addressesOf(list, whole, usualPort string, most int) ([]string, error) {
	var found []string
	for each := range strings.SplitSeq(list, ",") {
		if each = strings.TrimSpace(each); each == "" {
			continue
		}
		if usualPort != "" && !strings.Contains(each, ":") {
			each += ":" + usualPort
		}
		host, port, err := net.SplitHostPort(each)
		number, wrong := strconv.ParseUint(port, 10, 16)
		if err != nil || wrong != nil || number == 0 || host == "" || strings.ContainsAny(host, "/@ ") {
			return nil, fail(ErrInvalidArgument,
				"%q in the target %q is not \"host:port\" with a port from 1 to 65535; an IPv6 address stands in brackets", each, whole)
		}
		found = append(found, each)
	}
	if len(found) == 0 || len(found) > most {
		return nil, fail(ErrInvalidArgument, "the target %q names %d addresses; 1 to %d are allowed", whole, len(found), most)
	}
	return found, nil
}

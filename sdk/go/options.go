package pixiu

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"strings"
	"time"
)

// Options of a client; the zero value of each field is its default.
type Options struct {
	// UIN is the user who sends and subscribes; 0: a service.
	UIN uint64
	// Name of the client in logs and metrics, at most 128 bytes; default: host, process and a random part.
	Name string
	// Token is the login, if the cluster requires one; default: the environment variable PIXIU_TOKEN.
	Token string
	// TokenSource gives the current login for each call, instead of Token; it must be quick.
	TokenSource func() (string, error)
	// CA is the PEM file of the cluster's certificate authority, or "system"; default: the environment variable PIXIU_CA.
	// Without either there is no TLS.
	CA string
	// Certificate is a PEM file with the client's certificate and private key; default: PIXIU_CERTIFICATE.
	Certificate string
	// Device is the DeviceID of a subscriber, 1 to 2^47-1; 0: the client's name identifies the device.
	Device uint64
	// DeviceClass says what kind of device it is, such as "phone", at most 64 bytes.
	DeviceClass string

	ConnectTimeout  time.Duration // to reach the cluster; 5 s
	PublishTimeout  time.Duration // for which a message may stay unresolved; 10 s
	MailTimeout     time.Duration // for which a mail may stay unconfirmed, while it is sent again; 60 s
	TopicTimeout    time.Duration // for which a message to a durable topic may stay unconfirmed; 60 s
	JoinTimeout     time.Duration // for the cluster's confirmation of joins and leaves; 10 s
	RefreshInterval time.Duration // at which proxies are asked for the cluster's processes; 60 s
	Backoff         time.Duration // the first wait after a failed connection; it doubles, each shortened at random; 100 ms
	MaxBackoff      time.Duration // the longest wait after failed connections; 5 s

	QueueBytes     int // unresolved messages, in bytes; a send beyond it waits; 8 MiB
	QueueRecords   int // unresolved messages, in number; 100,000
	BatchBytes     int // the largest batch; a larger record is sent alone; 256 KiB
	BatchRecords   int // the largest batch, in records; 1,000
	WindowBytes    int // under way to one proxy until it says its own limit; 1 MiB
	WindowRecords  int // under way to one proxy; 20,000
	ReceiveBytes   int // a subscription's buffer; when it is full the client stops reading; 8 MiB
	ReceiveRecords int // a subscription's buffer, in messages; 50,000
	MaxRecordBytes int // the largest message; a larger one is refused before it is sent; 1 MiB

	// OnConnection hears when a connection is up, is lost, moves or ends. It must not block.
	OnConnection func(ConnectionEvent)
}

// A ConnectionState is what has happened to a connection.
type ConnectionState string

// States of connections.
const (
	Connected    ConnectionState = "connected"    // for the first time or again
	Reconnecting ConnectionState = "reconnecting" // it was lost: room messages may be missing, mail is not
	Moved        ConnectionState = "moved"        // another process took over from one that is ending: nothing is missing
	Closed       ConnectionState = "closed"       // closed, or refused
)

// A ConnectionEvent is reported to Options.OnConnection.
type ConnectionEvent struct {
	State   ConnectionState
	What    string // "publisher", "subscription" or "inbox"
	Source  any    // the *Client, *Subscription or *Inbox
	Address string
	Reason  string
}

const (
	maxNameBytes   = 128
	maxClassBytes  = 64
	maxDevice      = 1<<47 - 1
	maxTokenBytes  = 8192
	maxRecordBytes = 1 << 20
	messageBytes   = 8 << 20
)

func orDefault[T int | time.Duration](value *T, usual T) {
	if *value == 0 {
		*value = usual
	}
}

func (o Options) checked() (Options, error) {
	orDefault(&o.ConnectTimeout, 5*time.Second)
	orDefault(&o.PublishTimeout, 10*time.Second)
	orDefault(&o.MailTimeout, time.Minute)
	orDefault(&o.TopicTimeout, time.Minute)
	orDefault(&o.JoinTimeout, 10*time.Second)
	orDefault(&o.RefreshInterval, time.Minute)
	orDefault(&o.Backoff, 100*time.Millisecond)
	orDefault(&o.MaxBackoff, 5*time.Second)
	orDefault(&o.MaxRecordBytes, maxRecordBytes)
	orDefault(&o.QueueBytes, max(8<<20, o.MaxRecordBytes))
	orDefault(&o.QueueRecords, 100_000)
	orDefault(&o.BatchBytes, 256<<10)
	orDefault(&o.BatchRecords, 1_000)
	orDefault(&o.WindowBytes, 1<<20)
	orDefault(&o.WindowRecords, 20_000)
	orDefault(&o.ReceiveBytes, 8<<20)
	orDefault(&o.ReceiveRecords, 50_000)
	for name, value := range map[string]time.Duration{
		"ConnectTimeout": o.ConnectTimeout, "PublishTimeout": o.PublishTimeout, "MailTimeout": o.MailTimeout,
		"TopicTimeout": o.TopicTimeout, "JoinTimeout": o.JoinTimeout, "RefreshInterval": o.RefreshInterval, "Backoff": o.Backoff,
	} {
		if value < 0 {
			return o, fail(ErrConfiguration, "option %s = %s: it must be above 0", name, value)
		}
	}
	for name, value := range map[string]int{
		"QueueBytes": o.QueueBytes, "QueueRecords": o.QueueRecords, "BatchBytes": o.BatchBytes, "BatchRecords": o.BatchRecords,
		"WindowBytes": o.WindowBytes, "WindowRecords": o.WindowRecords, "ReceiveBytes": o.ReceiveBytes,
		"ReceiveRecords": o.ReceiveRecords, "MaxRecordBytes": o.MaxRecordBytes,
	} {
		if value < 0 {
			return o, fail(ErrConfiguration, "option %s = %d: it must be above 0", name, value)
		}
	}
	switch {
	case o.UIN >= 1<<63:
		return o, fail(ErrInvalidArgument, "a UIN is from 0 (a service) to 2^63-1, not %d", o.UIN)
	case len(o.Name) > maxNameBytes:
		return o, fail(ErrInvalidArgument, "a client's name has at most %d bytes, this one %d", maxNameBytes, len(o.Name))
	case o.Device > maxDevice:
		return o, fail(ErrConfiguration, "option Device = %d: it must be 0 (none) to %d", o.Device, maxDevice)
	case len(o.DeviceClass) > maxClassBytes:
		return o, fail(ErrConfiguration, "option DeviceClass: at most %d bytes", maxClassBytes)
	case o.MaxBackoff < o.Backoff:
		return o, fail(ErrConfiguration, "option MaxBackoff = %s: it must be at least Backoff (%s)", o.MaxBackoff, o.Backoff)
	case o.MaxRecordBytes > maxRecordBytes:
		return o, fail(ErrConfiguration, "option MaxRecordBytes = %d: at most %d", o.MaxRecordBytes, maxRecordBytes)
	case o.BatchBytes > messageBytes/2:
		return o, fail(ErrConfiguration, "option BatchBytes = %d: at most %d", o.BatchBytes, messageBytes/2)
	}
	return o, nil
}

// authorization returns the metadata value of a call; empty: no login.
func (o *Options) authorization() func() (string, error) {
	give := o.TokenSource
	if give == nil {
		token := o.Token
		if token == "" {
			token = os.Getenv("PIXIU_TOKEN")
		}
		give = func() (string, error) { return token, nil }
	}
	return func() (string, error) {
		token, err := give()
		if err != nil {
			return "", fmt.Errorf("the function that gives the token failed: %w", err)
		}
		token = strings.Trim(token, "\ufeff \r\n")
		for _, each := range token {
			if each < ' ' || each > '~' || len(token) > maxTokenBytes {
				return "", fail(ErrInvalidArgument, "a token is a text of at most %d ASCII characters", maxTokenBytes)
			}
		}
		if token == "" {
			return "", nil
		}
		return "Bearer " + token, nil
	}
}

// tlsConfig reads the certificates; nil: no TLS.
func (o *Options) tlsConfig() (*tls.Config, error) {
	ca, certificate := o.CA, o.Certificate
	if ca == "" {
		ca = os.Getenv("PIXIU_CA")
	}
	if certificate == "" {
		certificate = os.Getenv("PIXIU_CERTIFICATE")
	}
	if ca == "" {
		if certificate != "" {
			return nil, fail(ErrConfiguration, "a certificate needs TLS: set CA, or PIXIU_CA, to the authority of the cluster")
		}
		return nil, nil
	}
	found := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca != "system" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, fail(ErrConfiguration, "CA %s: cannot be read", ca).by(err)
		}
		found.RootCAs = x509.NewCertPool()
		if !found.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fail(ErrConfiguration, "CA %s: is not a PEM file that TLS can use", ca)
		}
	}
	if certificate != "" {
		own, err := tls.LoadX509KeyPair(certificate, certificate)
		if err != nil {
			return nil, fail(ErrConfiguration, "certificate %s: is not a PEM file with a certificate and its key", certificate).by(err)
		}
		found.Certificates = []tls.Certificate{own}
	}
	return found, nil
}

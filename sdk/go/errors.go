package pixiu

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Kinds of errors. Each error of this package wraps one: errors.Is(err, pixiu.ErrOverloaded).
//
// After ErrOutcomeUnknown, ErrDropped, ErrUndelivered and ErrTooOld a message may have been delivered; after the others it was not.
var (
	// The caller is at fault: change the call.
	ErrConfiguration    = errors.New("configuration")
	ErrInvalidArgument  = errors.New("invalid argument")
	ErrRecordTooLarge   = errors.New("record too large")
	ErrIDReused         = errors.New("ID reused")
	ErrTooOld           = errors.New("ID too old")
	ErrIDAhead          = errors.New("ID ahead")
	ErrNotConnected     = errors.New("not connected")
	ErrLoginReplaced    = errors.New("login replaced")
	ErrNotAuthenticated = errors.New("not authenticated")
	ErrNotAllowed       = errors.New("not allowed")
	ErrTooManyReceivers = errors.New("too many receivers")
	ErrUnknownTopic     = errors.New("unknown topic")
	ErrTopicExists      = errors.New("topic exists")
	ErrTopicInUse       = errors.New("topic in use")
	ErrStaleWriter      = errors.New("stale writer") // another one has opened the writer's name since

	// The other side, or the network, is at fault.
	ErrMalformed           = errors.New("malformed data")
	ErrChecksumWrong       = errors.New("checksum wrong")
	ErrUnavailable         = errors.New("unavailable")
	ErrUnreachable         = errors.New("unreachable")
	ErrRegistryUnavailable = errors.New("registry unavailable")
	ErrNotSent             = errors.New("not sent")
	ErrOutcomeUnknown      = errors.New("outcome unknown")
	ErrNotServed           = errors.New("not served")
	ErrDropped             = errors.New("dropped")
	ErrUndelivered         = errors.New("undelivered")
	ErrOffline             = errors.New("offline")
	ErrTooFewInSync        = errors.New("too few in sync")
	ErrDraining            = errors.New("draining")
	ErrRemote              = errors.New("remote")

	// A disk, or a limit.
	ErrDiskFull   = errors.New("disk full")
	ErrOverloaded = errors.New("overloaded")
	ErrInboxFull  = errors.New("inbox full")
	ErrLimit      = errors.New("limit")
)

var kindsByCode = map[string]error{
	"CONFIGURATION": ErrConfiguration, "INVALID_ARGUMENT": ErrInvalidArgument, "RECORD_TOO_LARGE": ErrRecordTooLarge,
	"ID_REUSED": ErrIDReused, "TOO_OLD": ErrTooOld, "ID_AHEAD": ErrIDAhead, "NOT_CONNECTED": ErrNotConnected,
	"LOGIN_REPLACED": ErrLoginReplaced, "UNAUTHENTICATED": ErrNotAuthenticated, "NOT_ALLOWED": ErrNotAllowed,
	"TOO_MANY_RECEIVERS": ErrTooManyReceivers, "UNKNOWN_TOPIC": ErrUnknownTopic, "NOT_FOUND": ErrUnknownTopic,
	"STALE_WRITER": ErrStaleWriter, "TOPIC_EXISTS": ErrTopicExists, "TOPIC_IN_USE": ErrTopicInUse, "MALFORMED": ErrMalformed, "CHECKSUM_WRONG": ErrChecksumWrong,
	"UNAVAILABLE": ErrUnavailable, "UNREACHABLE": ErrUnreachable, "REGISTRY_UNAVAILABLE": ErrRegistryUnavailable,
	"NOT_SENT": ErrNotSent, "OUTCOME_UNKNOWN": ErrOutcomeUnknown, "NOT_SERVED": ErrNotServed, "DROPPED": ErrDropped,
	"UNDELIVERED": ErrUndelivered, "OFFLINE": ErrOffline, "TOO_FEW_IN_SYNC": ErrTooFewInSync, "DRAINING": ErrDraining,
	"DISK_FULL": ErrDiskFull, "OVERLOADED": ErrOverloaded, "TOPIC_AWAY": ErrOverloaded, "INBOX_FULL": ErrInboxFull,
	"LIMIT": ErrLimit, "TOO_MANY_DEVICES": ErrLimit,
}

// An Error is what every call of this package fails with. Unwrap gives its kind, and the context's error if there is one.
type Error struct {
	Kind         error         // one of the kinds of this package
	Code         string        // of the cluster, such as "OVERLOADED"
	Text         string        // what happened, and what to do
	RetryAfter   time.Duration // after which to try again; 0: not given
	OpenInboxes  []uint64      // of a mail to several users: those that may not have it, as far as is known
	cause        error
	leader       string
	finalRefusal bool
}

func (e *Error) Error() string { return "pixiu: " + e.Code + ": " + e.Text }

// Unwrap is for errors.Is and errors.As.
func (e *Error) Unwrap() []error {
	if e.cause != nil {
		return []error{e.Kind, e.cause}
	}
	return []error{e.Kind}
}

func fail(kind error, format string, values ...any) *Error {
	return &Error{Kind: kind, Code: codeOf(kind), Text: fmt.Sprintf(format, values...)}
}

func codeOf(kind error) string {
	for code, each := range kindsByCode {
		if each == kind && code != "NOT_FOUND" && code != "TOPIC_AWAY" && code != "TOO_MANY_DEVICES" {
			return code
		}
	}
	return "REMOTE"
}

// refusal is the error that a peer reported by its code.
func refusal(code, text string, retryAfterMs uint64) *Error {
	kind, known := kindsByCode[code]
	if !known {
		kind = ErrRemote
	}
	return &Error{Kind: kind, Code: code, Text: text, RetryAfter: time.Duration(retryAfterMs) * time.Millisecond}
}

func (e *Error) by(cause error) *Error {
	e.cause = cause
	return e
}

func errorOf(err error) *Error {
	var found *Error
	if errors.As(err, &found) {
		return found
	}
	return fail(ErrUnavailable, "%s", reasonOf(err))
}

// isPerhaps: failures that themselves mean that the message may have been delivered.
func isPerhaps(code string) bool {
	return code == "OUTCOME_UNKNOWN" || code == "DROPPED" || code == "UNDELIVERED" || code == "TOO_OLD"
}

// inDoubt is the failure of a message with an earlier attempt that was sent and not answered: the answer to a later one does not
// settle it, unless every attempt gets it.
func inDoubt(why *Error, advice string) *Error {
	if isPerhaps(why.Code) || why.Code == "RECORD_TOO_LARGE" || why.Code == "TOO_MANY_RECEIVERS" {
		return why
	}
	found := fail(ErrOutcomeUnknown, "%s: %s; an earlier attempt was not answered and may have been delivered: %s", why.Code, why.Text, advice)
	found.RetryAfter = why.RetryAfter
	return found
}

// reasonOf says in a few words why a call failed.
func reasonOf(err error) string {
	if err == nil {
		return "the stream was closed by the other side"
	}
	found, ok := status.FromError(err)
	if !ok {
		return err.Error()
	}
	text := found.Message()
	switch {
	case strings.Contains(text, "connection refused"):
		return "connection refused: no process listens there"
	case strings.Contains(text, "certificate signed by unknown authority"), strings.Contains(text, "certificate has expired"):
		return "its certificate is not from the trusted authority (PIXIU_CA), or has expired"
	case strings.Contains(text, "first record does not look like a TLS handshake"):
		return "it does not speak TLS: leave CA and PIXIU_CA out"
	case strings.Contains(text, "error reading server preface"):
		return "it closed the connection at once: does it speak TLS, or require a certificate (PIXIU_CA, PIXIU_CERTIFICATE)?"
	}
	switch found.Code() {
	case codes.Unimplemented:
		return "a gRPC server that does not serve this (UNIMPLEMENTED): is it the address of another role?"
	case codes.DeadlineExceeded:
		return "no answer in time"
	}
	return found.Code().String() + ": " + text
}

// isRefused: statuses for which trying again is useless.
func isRefused(err error) bool {
	switch status.Code(err) {
	case codes.InvalidArgument, codes.Unauthenticated, codes.PermissionDenied:
		return true
	}
	return false
}

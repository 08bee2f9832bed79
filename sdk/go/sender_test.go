package pixiu

import (
	"testing"
)

// An answer may be on its way when the client is closed.
func TestAnAnswerAfterTheCloseIsIgnored(t *testing.T) {
	s := &sender{space: make(chan struct{}), pins: map[uint64]*pin{}, client: &Client{}}
	p := &proxy{state: proxyOpen, sent: 1, inFlight: []*flight{{ticket: &ticket{done: make(chan struct{}), attempts: 1}}}}
	p.stream = &sendStream{sender: s, proxy: p, wake: make(chan struct{}, 1)}
	s.proxies, s.unresolved = map[string]*proxy{"a": p}, 1
	stream, sent := p.stream, p.inFlight[0].ticket
	s.close()
	if !sent.resolved || sent.err == nil {
		t.Fatal("the message is not settled")
	}
	s.reply(stream, 1, nil, false)
}

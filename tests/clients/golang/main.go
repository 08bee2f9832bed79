// Driver of paho for Go: paho.golang for MQTT 5, paho.mqtt.golang for 3.1.1. Arguments and output: tests/clients/script.py.
package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"reflect"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/eclipse/paho.golang/paho"
	mqtt "github.com/eclipse/paho.mqtt.golang"
	"github.com/gorilla/websocket"
)

const (
	wait  = 10 * time.Second
	quiet = 500 * time.Millisecond
)

var (
	host, port, transport, version string
	roots                          *tls.Config
	prefix                         string
	number                         int
)

type message struct {
	Topic, Payload string
	QoS            byte
	Retain         bool
}

// client is what both libraries can do.
type client interface {
	subscribe(topic string, qos byte) error
	publish(topic, payload string, qos byte, retain bool) error
	cut()
	disconnect()
	inbox() chan message
}

func dial() (net.Conn, error) {
	address := net.JoinHostPort(host, port)
	switch transport {
	case "tls":
		return tls.Dial("tcp", address, roots)
	case "ws":
		dialer := websocket.Dialer{Subprotocols: []string{"mqtt"}}
		socket, _, err := dialer.Dial("ws://"+address+"/mqtt", http.Header{})
		if err != nil {
			return nil, err
		}
		return &webConn{Conn: socket.NetConn(), socket: socket}, nil
	}
	return net.Dial("tcp", address)
}

// webConn is a WebSocket as a stream of bytes.
type webConn struct {
	net.Conn
	socket *websocket.Conn
	rest   []byte
	write  sync.Mutex
}

func (c *webConn) Read(into []byte) (int, error) {
	for len(c.rest) == 0 {
		_, data, err := c.socket.ReadMessage()
		if err != nil {
			return 0, err
		}
		c.rest = data
	}
	n := copy(into, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

func (c *webConn) Write(data []byte) (int, error) {
	c.write.Lock()
	defer c.write.Unlock()
	return len(data), c.socket.WriteMessage(websocket.BinaryMessage, data)
}

func name() string {
	number++
	return fmt.Sprintf("%s-%d", strings.ReplaceAll(prefix, "/", "-"), number)
}

// five is a client of MQTT 5.
type five struct {
	c        *paho.Client
	conn     net.Conn
	messages chan message
}

func openFive(id string, will *message, keep bool) (client, bool, error) {
	conn, err := dial()
	if err != nil {
		return nil, false, err
	}
	f := &five{conn: conn, messages: make(chan message, 1000)}
	f.c = paho.NewClient(paho.ClientConfig{
		Conn: conn,
		OnPublishReceived: []func(paho.PublishReceived) (bool, error){func(r paho.PublishReceived) (bool, error) {
			p := r.Packet
			f.messages <- message{p.Topic, string(p.Payload), p.QoS, p.Retain}
			return true, nil
		}},
	})
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	connect := &paho.Connect{ClientID: id, KeepAlive: 30, CleanStart: !keep}
	if keep {
		expiry := uint32(3600)
		connect.Properties = &paho.ConnectProperties{SessionExpiryInterval: &expiry}
	}
	if will != nil {
		connect.WillMessage = &paho.WillMessage{Topic: will.Topic, Payload: []byte(will.Payload), QoS: will.QoS, Retain: will.Retain}
	}
	answer, err := f.c.Connect(ctx, connect)
	return f, err == nil && answer.SessionPresent, err
}

func (f *five) inbox() chan message { return f.messages }
func (f *five) subscribe(topic string, qos byte) error {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	_, err := f.c.Subscribe(ctx, &paho.Subscribe{Subscriptions: []paho.SubscribeOptions{{Topic: topic, QoS: qos}}})
	return err
}
func (f *five) publish(topic, payload string, qos byte, retain bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	_, err := f.c.Publish(ctx, &paho.Publish{Topic: topic, Payload: []byte(payload), QoS: qos, Retain: retain})
	return err
}
func (f *five) cut()        { f.conn.Close() }
func (f *five) disconnect() { f.c.Disconnect(&paho.Disconnect{}) }

// four is a client of MQTT 3.1.1.
type four struct {
	c        mqtt.Client
	conn     net.Conn
	messages chan message
}

func openFour(id string, will *message, keep bool) (client, bool, error) {
	f := &four{messages: make(chan message, 1000)}
	options := mqtt.NewClientOptions().AddBroker("tcp://" + net.JoinHostPort(host, port)).SetClientID(id).SetCleanSession(!keep)
	options.SetAutoReconnect(false).SetConnectRetry(false).SetConnectTimeout(wait).SetProtocolVersion(4)
	options.SetCustomOpenConnectionFn(func(*url.URL, mqtt.ClientOptions) (net.Conn, error) {
		var err error
		f.conn, err = dial()
		return f.conn, err
	})
	options.SetDefaultPublishHandler(func(_ mqtt.Client, m mqtt.Message) {
		f.messages <- message{m.Topic(), string(m.Payload()), m.Qos(), m.Retained()}
	})
	if will != nil {
		options.SetWill(will.Topic, will.Payload, will.QoS, will.Retain)
	}
	f.c = mqtt.NewClient(options)
	token := f.c.Connect()
	err := done(token)
	return f, err == nil && token.(*mqtt.ConnectToken).SessionPresent(), err
}

func done(token mqtt.Token) error {
	if !token.WaitTimeout(wait) {
		return fmt.Errorf("no answer")
	}
	return token.Error()
}

func (f *four) inbox() chan message { return f.messages }
func (f *four) subscribe(topic string, qos byte) error {
	token := f.c.Subscribe(topic, qos, nil)
	if err := done(token); err != nil {
		return err
	}
	for filter, code := range token.(*mqtt.SubscribeToken).Result() {
		if code >= 0x80 {
			return fmt.Errorf("SUBACK %d for %s", code, filter)
		}
	}
	return nil
}
func (f *four) publish(topic, payload string, qos byte, retain bool) error {
	return done(f.c.Publish(topic, qos, retain, payload))
}
func (f *four) cut()        { f.conn.Close() }
func (f *four) disconnect() { f.c.Disconnect(100) }

// The script.

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func expect(got, wanted any) {
	if !reflect.DeepEqual(got, wanted) {
		panic(fmt.Errorf("%v, not %v", got, wanted))
	}
}

func open(will *message) client {
	c, _ := openAs(name(), will, false)
	return c
}

// openAs opens a client, and says whether its session was there.
func openAs(id string, will *message, keep bool) (client, bool) {
	how := openFour
	if version == "5" {
		how = openFive
	}
	c, present, err := how(id, will, keep)
	must(err)
	return c, present
}

func next(c client) message {
	select {
	case m := <-c.inbox():
		return m
	case <-time.After(wait):
		panic(fmt.Errorf("no message"))
	}
}

func nothing(c client) {
	select {
	case m := <-c.inbox():
		panic(fmt.Errorf("one message too many: %v", m))
	case <-time.After(quiet):
	}
}

func level(qos byte) func() {
	return func() {
		topic := fmt.Sprintf("%s/qos%d", prefix, qos)
		receiver, sender := open(nil), open(nil)
		must(receiver.subscribe(topic, qos))
		for i := 0; i < 5; i++ {
			must(sender.publish(topic, fmt.Sprint(i), qos, false))
		}
		for i := 0; i < 5; i++ {
			expect(next(receiver), message{topic, fmt.Sprint(i), qos, false})
		}
		nothing(receiver)
		receiver.disconnect()
		sender.disconnect()
	}
}

func wildcard() {
	one, all, sender := open(nil), open(nil), open(nil)
	must(one.subscribe(prefix+"/w/+/c", 0))
	must(all.subscribe(prefix+"/w/#", 0))
	must(sender.publish(prefix+"/w/b/c", "both", 1, false))
	must(sender.publish(prefix+"/w/b/d", "one", 1, false))
	expect(next(one).Topic, prefix+"/w/b/c")
	expect([]string{next(all).Payload, next(all).Payload}, []string{"both", "one"})
	nothing(one)
	for _, c := range []client{one, all, sender} {
		c.disconnect()
	}
}

func retained() {
	topic := prefix + "/retained"
	sender, first, second := open(nil), open(nil), open(nil)
	must(sender.publish(topic, "kept", 1, true))
	must(first.subscribe(topic, 1))
	expect(next(first), message{topic, "kept", 1, true})
	must(sender.publish(topic, "", 1, true))
	expect(next(first).Retain, false)
	must(second.subscribe(topic, 1))
	nothing(second)
	for _, c := range []client{sender, first, second} {
		c.disconnect()
	}
}

func will() {
	topic := prefix + "/will"
	watcher := open(nil)
	must(watcher.subscribe(topic, 1))
	open(&message{topic, "left", 1, false}).disconnect()
	open(&message{topic, "cut", 1, false}).cut()
	expect(next(watcher).Payload, "cut")
	nothing(watcher)
	watcher.disconnect()
}

func shared() {
	topic := prefix + "/shared"
	members, sender := []client{open(nil), open(nil)}, open(nil)
	for _, member := range members {
		must(member.subscribe("$share/g/"+topic, 1))
	}
	var wanted, got []string
	for i := 0; i < 10; i++ {
		must(sender.publish(topic, fmt.Sprint(i), 1, false))
		wanted = append(wanted, fmt.Sprint(i))
	}
	for len(got) < 10 {
		select {
		case m := <-members[0].inbox():
			got = append(got, m.Payload)
		case m := <-members[1].inbox():
			got = append(got, m.Payload)
		case <-time.After(wait):
			panic(fmt.Errorf("only %v", got))
		}
	}
	sort.Strings(got)
	expect(got, wanted)
	for _, member := range members {
		nothing(member)
		member.disconnect()
	}
	sender.disconnect()
}

func resume() {
	base, id := prefix+"/resume", name()
	first, _ := openAs(id, nil, true)
	for _, qos := range []byte{1, 2} {
		must(first.subscribe(fmt.Sprintf("%s/%d", base, qos), qos))
	}
	first.disconnect()
	sender := open(nil)
	for i := 0; i < 5; i++ {
		for _, qos := range []byte{1, 2} {
			must(sender.publish(fmt.Sprintf("%s/%d", base, qos), fmt.Sprint(i), qos, false))
		}
	}
	again, present := openAs(id, nil, true)
	expect(present, true)
	got := map[byte][]string{}
	for i := 0; i < 10; i++ {
		m := next(again)
		expect(m.Topic, fmt.Sprintf("%s/%d", base, m.QoS))
		got[m.QoS] = append(got[m.QoS], m.Payload)
	}
	for _, qos := range []byte{1, 2} {
		expect(got[qos], []string{"0", "1", "2", "3", "4"})
	}
	nothing(again)
	again.disconnect()
	sender.disconnect()
}

func main() {
	host, port, transport, version = os.Args[1], os.Args[2], os.Args[3], os.Args[4]
	if len(os.Args) > 5 {
		pem, err := os.ReadFile(os.Args[5])
		must(err)
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(pem)
		roots = &tls.Config{RootCAs: pool, ServerName: host}
	}
	random := make([]byte, 6)
	rand.Read(random)
	prefix = "clients/" + hex.EncodeToString(random)
	found := map[string]string{}
	for _, check := range []struct {
		name string
		run  func()
	}{
		{"connect", func() { open(nil).disconnect() }}, {"qos0", level(0)}, {"qos1", level(1)}, {"qos2", level(2)},
		{"wildcard", wildcard}, {"retained", retained}, {"will", will}, {"shared", shared},
		{"resume", resume},
	} {
		func() {
			defer func() {
				if wrong := recover(); wrong != nil {
					found[check.name] = fmt.Sprint(wrong)
				}
			}()
			check.run()
			found[check.name] = "ok"
		}()
	}
	out, _ := json.Marshal(found)
	fmt.Println(string(out))
}

// go-nsq: driver TCP_HOST:PORT LOOKUP_HOST:PORT TOPIC. Plays the script of script.py.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/nsqio/go-nsq"
)

var (
	mutex     sync.Mutex
	finished  = map[string]int{}
	attempts  = map[string]uint16{}
	wanted    []string
	delayedAt time.Time
	cameAt    time.Time
)

type handler struct{ done chan bool }

func (h *handler) HandleMessage(message *nsq.Message) error {
	mutex.Lock()
	defer mutex.Unlock()
	body := string(message.Body)
	if message.Attempts > attempts[body] {
		attempts[body] = message.Attempts
	}
	if body == "dpub" && cameAt.IsZero() {
		cameAt = time.Now()
	}
	if body == "pub-3" && message.Attempts == 1 {
		message.RequeueWithoutBackoff(100 * time.Millisecond)
		return nil
	}
	if body == "pub-4" {
		message.Touch()
	}
	message.Finish()
	finished[body]++
	for _, name := range wanted {
		if finished[name] == 0 {
			return nil
		}
	}
	select {
	case h.done <- true:
	default:
	}
	return nil
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	tcp, lookup, topic := os.Args[1], os.Args[2], os.Args[3]
	config := nsq.NewConfig()
	config.LookupdPollInterval = time.Second
	config.MaxInFlight = 5
	quiet := log.New(os.Stderr, "", 0)
	producer, err := nsq.NewProducer(tcp, config)
	check(err)
	producer.SetLogger(quiet, nsq.LogLevelError)
	var many [][]byte
	for n := 0; n < 20; n++ {
		name := fmt.Sprintf("pub-%d", n)
		wanted = append(wanted, name)
		check(producer.Publish(topic, []byte(name)))
	}
	for n := 0; n < 10; n++ {
		name := fmt.Sprintf("mpub-%d", n)
		wanted = append(wanted, name)
		many = append(many, []byte(name))
	}
	wanted = append(wanted, "dpub")
	check(producer.MultiPublish(topic, many))
	delayedAt = time.Now()
	check(producer.DeferredPublish(topic, time.Second, []byte("dpub")))
	consumer, err := nsq.NewConsumer(topic, "work", config)
	check(err)
	consumer.SetLogger(quiet, nsq.LogLevelError)
	done := make(chan bool, 1)
	consumer.AddHandler(&handler{done})
	check(consumer.ConnectToNSQLookupd(lookup))
	select {
	case <-done:
	case <-time.After(time.Minute):
	}
	consumer.Stop()
	producer.Stop()
	mutex.Lock()
	defer mutex.Unlock()
	found := map[string]string{}
	for _, kind := range []string{"pub", "mpub", "dpub"} {
		found[kind] = "ok"
		for _, name := range wanted {
			if strings.Split(name, "-")[0] == kind && finished[name] != 1 {
				found[kind] = fmt.Sprintf("%s finished %d times", name, finished[name])
			}
		}
	}
	if late := cameAt.Sub(delayedAt); found["dpub"] == "ok" && late < 950*time.Millisecond {
		found["dpub"] = fmt.Sprintf("came after %s", late)
	}
	found["requeue"], found["touch"] = "ok", "ok"
	if attempts["pub-3"] != 2 {
		found["requeue"] = fmt.Sprintf("attempts %d", attempts["pub-3"])
	}
	if finished["pub-4"] != 1 {
		found["touch"] = "not finished"
	}
	said, _ := json.Marshal(found)
	fmt.Println(string(said))
}

// Package pixiu is a client of a Pixiu cluster: messages to rooms, users and free topics, signals, mail, durable topics with their
// channels, and presence.
//
//	px, err := pixiu.Connect(ctx, "127.0.0.1:7002")
//	if err != nil { … }
//	defer px.Close()
//	err = px.Room(42).Send(ctx, []byte("hello"))   // the brokers have it
//
//	sub, err := px.Subscribe(ctx, pixiu.Rooms(42)) // joined: what is sent from now on arrives
//	for message, err := range sub.All(ctx) { … }
//
// Every call that waits takes a context. Its errors wrap one of the kinds in errors.go, for errors.Is, and the context's own
// error where that ended the call. A Client may be used by several goroutines; Close ends all that it started.
package pixiu

// A small client of a Pixiu cluster, made from proto/, docs/protocol.md and docs/write_a_client.md alone. README.md says how to build it.
//
//	pixiu-go -proxy 127.0.0.1:7002 send 42 "hello"        a message to a room
//	pixiu-go -proxy 127.0.0.1:7002 listen 42              what is sent to the room
//	pixiu-go -proxy 127.0.0.1:7002 mail 8 "kept for you"  into a user's inbox
//	pixiu-go -proxy 127.0.0.1:7002 inbox 8 phone          a device's mail, acknowledged
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	wire "pixiu/wire/v1"
)

const clientName = "pixiu-go"

var (
	proxy = flag.String("proxy", "127.0.0.1:7002", "gRPC address of any proxy")
	uin   = flag.Uint64("uin", 0, "who sends; 0: a service")
	count = flag.Int("n", 0, "end after so many messages; 0: never")
)

func main() {
	flag.Parse()
	log.SetFlags(0)
	ctx := context.Background()
	var err error
	switch number := key(); flag.Arg(0) {
	case "send":
		err = send(ctx, number, []byte(flag.Arg(2)))
	case "listen":
		err = listen(ctx, number)
	case "mail":
		err = mail(ctx, number, []byte(flag.Arg(2)))
	case "inbox":
		err = inbox(ctx, number, flag.Arg(2))
	default:
		err = errors.New("send, listen, mail or inbox")
	}
	if err != nil {
		log.Print("pixiu-go: ", err)
		os.Exit(1)
	}
}

// key is the RoomID or UIN that the command line names.
func key() uint64 {
	number, err := strconv.ParseUint(flag.Arg(1), 10, 63)
	if err != nil || number == 0 {
		log.Fatalf("pixiu-go: %q is no RoomID or UIN", flag.Arg(1))
	}
	return number
}

func dial(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// A publisher is a Publish stream that lends a worker number, for the IDs of messages.
type publisher struct {
	stream   wire.Publisher_PublishClient
	worker   uint32
	lastMs   int64
	untilMs  int64
	sequence uint32
}

// open says hello, and waits for a worker number. A program that runs for hours renews it (`renew_worker`) at half of its time.
func open(ctx context.Context, connection *grpc.ClientConn) (*publisher, error) {
	stream, err := wire.NewPublisherClient(connection).Publish(ctx)
	if err != nil {
		return nil, err
	}
	hello := &wire.PublishHello{Client: clientName, LendWorker: true}
	if err := stream.Send(&wire.PublishRequest{Hello: hello}); err != nil {
		return nil, err
	}
	for {
		reply, err := stream.Recv()
		if err != nil {
			return nil, err
		}
		if len(reply.Failures) > 0 {
			return nil, fmt.Errorf("no worker number: %s: %s", reply.Failures[0].Code, reply.Failures[0].Text)
		}
		if reply.WorkerUntilMs != 0 {
			from, until := int64(reply.WorkerFromMs), int64(reply.WorkerUntilMs)
			return &publisher{stream: stream, worker: reply.Worker, lastMs: from - 1, untilMs: until}, nil
		}
	}
}

// id makes the next ID: never for a time before the last one, nor outside of the time for which the number was lent.
func (p *publisher) id() (uint64, error) {
	now := time.Now().UnixMilli()
	if now > p.lastMs {
		p.lastMs, p.sequence = now, 0
	} else if p.sequence++; p.sequence == 1024 {
		p.lastMs, p.sequence = p.lastMs+1, 0
	}
	if p.lastMs >= p.untilMs {
		return 0, errors.New("the worker number's time is over")
	}
	return Snowflake(p.lastMs, p.worker, p.sequence), nil
}

// close gives the worker number back, and waits until the proxy ends the stream.
func (p *publisher) close() {
	if p.stream.Send(&wire.PublishRequest{LastUsedMs: uint64(p.lastMs)}) != nil || p.stream.CloseSend() != nil {
		return // its time ends by itself
	}
	for {
		if _, err := p.stream.Recv(); err != nil {
			return
		}
	}
}

// send publishes a message to a room, and returns when the brokers have it.
func send(ctx context.Context, room uint64, body []byte) error {
	connection, err := dial(*proxy)
	if err != nil {
		return err
	}
	defer connection.Close()
	p, err := open(ctx, connection)
	if err != nil {
		return err
	}
	defer p.close()
	id, err := p.id()
	if err != nil {
		return err
	}
	record := Record{Kind: kindRoom, Flags: flagToRoom, Type: typeNormal, Snowflake: id, Key: room, Sender: *uin, Body: body}
	if err := p.stream.Send(&wire.PublishRequest{Batch: record.Encode(), Count: 1, Position: 1}); err != nil {
		return err
	}
	for {
		reply, err := p.stream.Recv()
		if err != nil {
			return fmt.Errorf("whether it was taken is unknown: %w", err)
		}
		for _, failure := range reply.Failures {
			return fmt.Errorf("%s: %s", failure.Code, failure.Text)
		}
		if reply.UpTo >= 1 {
			fmt.Println("accepted")
			return nil
		}
	}
}

// mail puts a mail into an inbox, and returns when it is on the disks of all replicas in sync. A stream that ends is followed by
// one with a higher generation, at which the same record, with the same ID, is sent again: it is stored once.
func mail(ctx context.Context, receiver uint64, body []byte) error {
	connection, err := dial(*proxy)
	if err != nil {
		return err
	}
	defer connection.Close()
	p, err := open(ctx, connection)
	if err != nil {
		return err
	}
	defer p.close()
	id, err := p.id()
	if err != nil {
		return err
	}
	record := Record{Kind: kindMail, Type: typeNormal, Snowflake: id, Key: receiver, Sender: *uin, Body: body}
	generation := uint32((time.Now().UnixMilli() - epoch) / 1000)
	for attempt := 0; attempt < 8; attempt++ {
		again, problem := mailOnce(ctx, connection, p.worker, generation, record.Encode())
		if !again {
			return problem
		}
		err = problem
		time.Sleep(100 * time.Millisecond << attempt)
		generation++
	}
	return err
}

// mailOnce sends a mail on one stream. again: it may be sent again, on another stream.
func mailOnce(ctx context.Context, connection *grpc.ClientConn, worker, generation uint32, record []byte) (again bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := wire.NewMailerClient(connection).Send(ctx)
	if err != nil {
		return true, err
	}
	hello := &wire.MailHello{Client: clientName, Worker: worker, Generation: generation}
	if err := stream.Send(&wire.MailRequest{Hello: hello}); err != nil {
		return true, err
	}
	if err := stream.Send(&wire.MailRequest{Batch: record, Count: 1, Position: 1}); err != nil {
		return true, err
	}
	for {
		reply, err := stream.Recv()
		if err != nil {
			return true, err
		}
		for _, result := range reply.Results {
			if result.Code != "" {
				return result.Code == "OUTCOME_UNKNOWN", fmt.Errorf("%s: %s", result.Code, result.Text)
			}
			fmt.Printf("stored in %d copies, MsgID %016x\n", result.Copies, result.MsgIds[0])
			return false, nil
		}
		if end := reply.End; end != nil {
			final := end.Code == "MALFORMED" || end.Code == "INVALID_ARGUMENT" || end.Code == "NOT_SERVED"
			return !final, fmt.Errorf("%s: %s", end.Code, end.Text)
		}
	}
}

// subscribe opens a Subscribe stream at a gateway that a proxy names, and waits until the gateway has answered the hello.
func subscribe(ctx context.Context, first *wire.SubscribeRequest) (wire.Subscriber_SubscribeClient, error) {
	connection, err := dial(*proxy)
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	cluster, err := wire.NewPublisherClient(connection).Cluster(ctx, &wire.ClusterRequest{})
	if err != nil {
		return nil, err
	}
	for _, member := range cluster.Members {
		if member.Role != "gateway" {
			continue
		}
		gateway, err := dial(member.GrpcAddress)
		if err != nil {
			return nil, err
		}
		stream, err := wire.NewSubscriberClient(gateway).Subscribe(ctx)
		if err != nil {
			return nil, err
		}
		return stream, stream.Send(first)
	}
	return nil, errors.New("the cluster has no gateway")
}

// listen joins a room, and prints what is sent to it.
func listen(ctx context.Context, room uint64) error {
	stream, err := subscribe(ctx, &wire.SubscribeRequest{Hello: &wire.SubscribeHello{Uin: *uin, Client: clientName}})
	if err != nil {
		return err
	}
	joined := false
	for seen := 0; *count == 0 || seen < *count; {
		reply, err := stream.Recv()
		if err != nil {
			return err
		}
		if reply.ErrorCode != "" {
			return fmt.Errorf("%s: %s", reply.ErrorCode, reply.ErrorText)
		}
		if !joined { // the answer to the hello
			joined = true
			if err := stream.Send(&wire.SubscribeRequest{JoinRooms: []uint64{room}, Request: 1}); err != nil {
				return err
			}
		}
		if reply.Request == 1 {
			fmt.Println("joined") // what is sent from now on, anywhere in the cluster, arrives
		}
		for batch := reply.Batch; len(batch) > 0; {
			var record Record
			if record, batch, err = Decode(batch); err != nil {
				return err
			}
			fmt.Printf("%d: %s\n", record.Sender, record.Body)
			seen++
		}
	}
	return nil
}

// inbox prints the mail of a device, and acknowledges each: the device does not get it again.
func inbox(ctx context.Context, user uint64, device string) error {
	hello := &wire.SubscribeHello{Uin: user, Client: device, Mail: true} // the device is derived from the client's name
	stream, err := subscribe(ctx, &wire.SubscribeRequest{Hello: hello, Request: 1})
	if err != nil {
		return err
	}
	shown := map[uint64]bool{} // MsgIDs: what comes again over another relay is shown once
	last, confirmed := uint64(1), uint64(0)
	for *count == 0 || len(shown) < *count || confirmed < last {
		reply, err := stream.Recv()
		if err != nil {
			return err
		}
		if reply.ErrorCode != "" {
			return fmt.Errorf("%s: %s", reply.ErrorCode, reply.ErrorText)
		}
		if reply.Request != 0 {
			confirmed = reply.Request
		}
		if reply.Request == 1 {
			fmt.Println("ready")
		}
		var acknowledgements []*wire.MailAcknowledgement
		for batch := reply.Mail; len(batch) > 0; {
			var envelope Envelope
			if envelope, batch, err = DecodeEnvelope(batch); err != nil {
				return err
			}
			if !envelope.Gap && !shown[envelope.MsgID] {
				shown[envelope.MsgID] = true
				fmt.Printf("%d: %s\n", envelope.Record.Sender, envelope.Record.Body)
			}
			place := &wire.MailAcknowledgement{Lane: uint32(envelope.Lane), First: envelope.Seq, Last: envelope.Seq}
			acknowledgements = append(acknowledgements, place)
		}
		if len(acknowledgements) > 0 {
			last++ // its echo says that the gateway has them
			if err := stream.Send(&wire.SubscribeRequest{MailAcknowledgements: acknowledgements, Request: last}); err != nil {
				return err
			}
		}
	}
	return nil
}

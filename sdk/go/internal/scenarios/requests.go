package main

import (
	"context"
	"errors"
	"slices"
	"time"

	"pixiu"
)

// answering replies to requests with their payload, doubled, until the play ends.
func answering(p *play, px *pixiu.Client, to pixiu.SubscribeOption) error {
	sub, err := px.Subscribe(p.ctx, to)
	if err != nil {
		return err
	}
	go func() {
		_ = sub.Run(p.ctx, func(message *pixiu.Message) error {
			if message.Headers()["reply-to"] == "" {
				return nil
			}
			return px.Reply(p.ctx, message, slices.Concat(message.Payload, message.Payload))
		})
	}()
	return nil
}

func init() {
	scenarios["request/reply"] = func(p *play) error {
		other, err := p.client(pixiu.Options{})
		if err != nil {
			return err
		}
		px, err := p.client(pixiu.Options{})
		if err := errors.Join(err, answering(p, other, pixiu.Rooms(p.seed))); err != nil {
			return err
		}
		outcomes := make(chan error)
		for _, text := range numbered(50) {
			go func() {
				reply, err := px.Room(p.seed).Request(p.ctx, []byte(text), pixiu.Headers(map[string]string{"n": text}))
				outcomes <- errors.Join(err, expect(err == nil && string(reply.Payload) == text+text, "%s: %+v", text, reply))
			}()
		}
		for range 50 {
			err = errors.Join(err, <-outcomes)
		}
		return err
	}
	scenarios["request/user"] = func(p *play) error {
		phone, err := p.client(pixiu.Options{UIN: p.seed, Name: "phone"})
		if err != nil {
			return err
		}
		px, err := p.client(pixiu.Options{})
		if err := errors.Join(err, answering(p, phone, pixiu.Chat())); err != nil {
			return err
		}
		reply, err := px.User(p.seed).Request(p.ctx, []byte("ab"))
		return errors.Join(err, expect(err == nil && string(reply.Payload) == "abab", "%+v", reply))
	}
	scenarios["request/unanswered"] = func(p *play) error {
		px, sub, err := p.pair()
		if err != nil {
			return err
		}
		soon, cancel := context.WithTimeout(p.ctx, time.Second)
		defer cancel()
		_, err = px.Room(p.seed).Request(soon, []byte("anybody"))
		if err := kindOf(err, pixiu.ErrOutcomeUnknown); err != nil {
			return err
		}
		asked, err := sub.Next(p.ctx)
		if err != nil {
			return err
		}
		if err := errors.Join(px.Reply(p.ctx, asked, []byte("late")), answering(p, px, pixiu.Rooms(p.seed+1))); err != nil {
			return err
		}
		reply, err := px.Room(p.seed+1).Request(p.ctx, []byte("x"))
		return errors.Join(err, expect(err == nil && string(reply.Payload) == "xx", "%+v", reply))
	}
	scenarios["request/no_request"] = func(p *play) error {
		px, sub, err := p.pair()
		if err != nil {
			return err
		}
		if err := px.Room(p.seed).Send(p.ctx, nil, pixiu.Headers(map[string]string{"request-id": "1"})); err != nil {
			return err
		}
		message, err := sub.Next(p.ctx)
		if err != nil {
			return err
		}
		return kindOf(px.Reply(p.ctx, message, nil), pixiu.ErrInvalidArgument)
	}
	scenarios["interop/requests"] = func(p *play) error {
		px, err := p.client(pixiu.Options{})
		if err := errors.Join(err, p.do("answer", p.seed, "python"), answering(p, px, pixiu.Rooms(p.seed+1))); err != nil {
			return err
		}
		reply, err := px.Room(p.seed).Request(p.ctx, []byte("go"))
		if err := errors.Join(err, expect(err == nil && string(reply.Payload) == "python", "%+v", reply)); err != nil {
			return err
		}
		heard, err := p.ask("request", p.seed+1, "ab")
		return errors.Join(err, expect(heard == "abab", "%q", heard))
	}
}

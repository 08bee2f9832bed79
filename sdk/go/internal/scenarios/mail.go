package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"pixiu"
)

// mails takes a number of mails, and acknowledges them.
func mails(p *play, inbox *pixiu.Inbox, count int) ([]string, error) {
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	var found []string
	for len(found) < count {
		mail, err := inbox.Next(ctx)
		if err != nil {
			return found, fmt.Errorf("after %d of %d mails: %w", len(found), count, err)
		}
		found = append(found, string(mail.Payload))
		if err := mail.Ack(); err != nil {
			return found, err
		}
	}
	return found, nil
}

func (p *play) mailbox(device string) (*pixiu.Client, *pixiu.Inbox, error) {
	px, err := p.client(pixiu.Options{UIN: p.seed})
	if err != nil {
		return nil, nil, err
	}
	inbox, err := px.Inbox(p.ctx, device)
	return px, inbox, err
}

func send(p *play, px *pixiu.Client, uin uint64, texts ...string) error {
	for _, text := range texts {
		if _, err := px.User(uin).Mail(p.ctx, []byte(text)); err != nil {
			return err
		}
	}
	return nil
}

// only checks that these mails come and nothing before them.
func only(p *play, device string, wanted ...string) error {
	_, inbox, err := p.mailbox(device)
	if err != nil {
		return err
	}
	found, err := mails(p, inbox, len(wanted))
	return errors.Join(err, same(found, wanted), inbox.Close())
}

// mailed sends mail while a process is killed; each must be confirmed and come once.
func mailed(p *play, role string) error {
	px, inbox, err := p.mailbox("phone")
	if err != nil {
		return err
	}
	address := "leader"
	if role == "proxy" {
		address = px.Cluster().Proxies[0]
	}
	var receipts []*pixiu.MailReceipt
	for at, text := range numbered(60) {
		if at == 20 {
			if err := p.do("kill", role, address); err != nil {
				return err
			}
		}
		receipt, err := px.User(p.seed).MailSoon(p.ctx, []byte(text))
		if err != nil {
			return err
		}
		receipts = append(receipts, receipt)
	}
	for _, receipt := range receipts {
		if err := receipt.Wait(p.ctx); err != nil {
			return err
		}
	}
	found, err := mails(p, inbox, 60)
	if err := errors.Join(err, same(found, numbered(60)), p.do("healthy")); err != nil {
		return err
	}
	if err := send(p, px, p.seed, "end"); err != nil {
		return err
	}
	found, err = mails(p, inbox, 1)
	return errors.Join(err, same(found, []string{"end"}))
}

func init() {
	scenarios["inbox/send_receive"] = func(p *play) error {
		px, inbox, err := p.mailbox("phone")
		if err != nil {
			return err
		}
		receipt, err := px.User(p.seed).Mail(p.ctx, []byte("kept"))
		if err != nil {
			return err
		}
		mail, err := inbox.Next(p.ctx)
		if err != nil {
			return err
		}
		return errors.Join(mail.Ack(), inbox.Flush(p.ctx), expect(
			receipt.MsgID() != 0 && mail.MsgID == receipt.MsgID() && mail.Sender == p.seed && string(mail.Payload) == "kept" && mail.User == p.seed,
			"%+v, not %x", mail, receipt.MsgID()))
	}
	scenarios["inbox/waits"] = func(p *play) error {
		px, inbox, err := p.mailbox("phone")
		if err := errors.Join(err, inbox.Close(), send(p, px, p.seed, "later")); err != nil {
			return err
		}
		return only(p, "phone", "later")
	}
	scenarios["inbox/order"] = func(p *play) error {
		px, inbox, err := p.mailbox("phone")
		if err != nil {
			return err
		}
		for _, text := range numbered(200) {
			if _, err := px.User(p.seed).MailSoon(p.ctx, []byte(text)); err != nil {
				return err
			}
		}
		found, err := mails(p, inbox, 200)
		return errors.Join(err, same(found, numbered(200)))
	}
	scenarios["inbox/ack_survives_reconnect"] = func(p *play) error {
		px, inbox, err := p.mailbox("phone")
		if err := errors.Join(err, send(p, px, p.seed, "one", "two")); err != nil {
			return err
		}
		found, err := mails(p, inbox, 2)
		if err := errors.Join(err, same(found, []string{"one", "two"}), inbox.Flush(p.ctx), inbox.Close()); err != nil {
			return err
		}
		if err := send(p, px, p.seed, "three"); err != nil {
			return err
		}
		return only(p, "phone", "three")
	}
	scenarios["inbox/unacknowledged_comes_again"] = func(p *play) error {
		px, inbox, err := p.mailbox("phone")
		if err := errors.Join(err, send(p, px, p.seed, "one")); err != nil {
			return err
		}
		if _, err := inbox.Next(p.ctx); err != nil {
			return err
		}
		if err := inbox.Close(); err != nil {
			return err
		}
		return only(p, "phone", "one")
	}
	scenarios["inbox/two_devices"] = func(p *play) error {
		px, phone, err := p.mailbox("phone")
		if err != nil {
			return err
		}
		desk, err := px.Inbox(p.ctx, "desk")
		if err := errors.Join(err, send(p, px, p.seed, "one")); err != nil {
			return err
		}
		found, err := mails(p, phone, 1)
		if err := errors.Join(err, same(found, []string{"one"}), phone.Flush(p.ctx)); err != nil {
			return err
		}
		if _, err := desk.Next(p.ctx); err != nil {
			return err
		}
		if err := desk.Close(); err != nil {
			return err
		}
		return only(p, "desk", "one")
	}
	scenarios["inbox/many_receivers"] = func(p *play) error {
		px, err := p.client(pixiu.Options{})
		if err != nil {
			return err
		}
		if _, err := px.User(p.seed).Mail(p.ctx, []byte("all"), pixiu.Also(p.seed+1, p.seed+2)); err != nil {
			return err
		}
		for uin := p.seed; uin < p.seed+3; uin++ {
			inbox, err := px.Inbox(p.ctx, "phone", pixiu.OfUser(uin))
			if err != nil {
				return err
			}
			found, err := mails(p, inbox, 1)
			if err := errors.Join(err, same(found, []string{"all"}), inbox.Close()); err != nil {
				return err
			}
		}
		return nil
	}
	scenarios["inbox/lanes"] = func(p *play) error {
		px, inbox, err := p.mailbox("phone")
		if err != nil {
			return err
		}
		if _, err := px.User(p.seed).Mail(p.ctx, []byte("0"), pixiu.FirstLane()); err != nil {
			return err
		}
		if err := send(p, px, p.seed, "1"); err != nil {
			return err
		}
		for range 2 {
			mail, err := inbox.Next(p.ctx)
			if err != nil {
				return err
			}
			if err := expect(string(mail.Payload) == fmt.Sprint(mail.Lane), "%s in lane %d", mail.Payload, mail.Lane); err != nil {
				return err
			}
		}
		return nil
	}
	scenarios["interop/mail"] = func(p *play) error {
		px, inbox, err := p.mailbox("phone")
		if err := errors.Join(err, p.do("mail", p.seed, "python"), send(p, px, p.seed+1, "one", "two")); err != nil {
			return err
		}
		found, err := mails(p, inbox, 1)
		heard, failed := p.ask("inbox", p.seed+1, "phone", 2)
		return errors.Join(err, failed, same(found, []string{"python"}), expect(heard == "one two", "%q", heard))
	}
	scenarios["reconnect/inbox_gateway_killed"] = func(p *play) error {
		px, inbox, err := p.mailbox("phone")
		if err := errors.Join(err, send(p, px, p.seed, "one")); err != nil {
			return err
		}
		found, err := mails(p, inbox, 1)
		if err := errors.Join(err, same(found, []string{"one"}), inbox.Flush(p.ctx)); err != nil {
			return err
		}
		if err := p.do("kill", "gateway", inbox.Gateway()); err != nil {
			return err
		}
		if err := send(p, px, p.seed, numbered(30)...); err != nil {
			return err
		}
		found, err = mails(p, inbox, 30)
		slices.Sort(found)
		wanted := numbered(30)
		slices.Sort(wanted)
		return errors.Join(err, expect(slices.Equal(found, wanted), "%s", strings.Join(found, " ")), p.do("healthy"))
	}
	scenarios["reconnect/mail_proxy_killed"] = func(p *play) error { return mailed(p, "proxy") }
	scenarios["reconnect/mail_leader_killed"] = func(p *play) error { return mailed(p, "pi") }
}

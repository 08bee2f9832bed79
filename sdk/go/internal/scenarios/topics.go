package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"pixiu"
)

// made is a client and a topic of the play's own, which ends with it.
func made(p *play, parts int, settings pixiu.TopicSettings) (*pixiu.Client, *pixiu.Topic, error) {
	px, err := p.client(pixiu.Options{})
	if err != nil {
		return nil, nil, err
	}
	name := p.topic()
	if _, err := px.Topics().Create(p.ctx, name, parts, settings); err != nil {
		return nil, nil, err
	}
	p.later(func() error { return px.Topics().Delete(context.Background(), name, true) })
	return px, px.Topic(name), nil
}

// written stores messages "mI" with the keys "kJ", J = I % keys, without waiting for each.
func written(p *play, topic *pixiu.Topic, first, count, keys int) error {
	var receipts []*pixiu.TopicReceipt
	for at := first; at < first+count; at++ {
		receipt, err := topic.SendSoon(p.ctx, fmt.Appendf(nil, "m%d", at), pixiu.Key(fmt.Sprintf("k%d", at%keys)))
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
	return nil
}

// inOrder reads a number of messages from a start, each once, in order for each key.
func inOrder(p *play, topic *pixiu.Topic, start pixiu.Start, count int) (*pixiu.TopicReader, error) {
	reader, err := topic.Reader(p.ctx, start)
	if err != nil {
		return nil, err
	}
	return reader, ordered(p, reader, count)
}

func ordered(p *play, reader *pixiu.TopicReader, count int) error {
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	last := map[string]int{}
	for at := range count {
		message, err := reader.Next(ctx)
		if err != nil {
			return fmt.Errorf("after %d of %d messages: %w", at, count, err)
		}
		number := -1
		if _, err := fmt.Sscanf(string(message.Body), "m%d", &number); err != nil {
			return err
		}
		if before, known := last[string(message.Key)]; known && number <= before {
			return fmt.Errorf("m%d after m%d of %s", number, before, message.Key)
		}
		last[string(message.Key)] = number
	}
	return nil
}

// taken takes a number of messages of a member, and acknowledges them.
func taken(p *play, member *pixiu.ChannelMember, count int) ([]string, error) {
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	var found []string
	for len(found) < count {
		message, err := member.Next(ctx)
		if err != nil {
			return found, fmt.Errorf("after %d of %d messages: %w", len(found), count, err)
		}
		counts, err := message.Ack(ctx)
		if err != nil {
			return found, err
		}
		if counts {
			found = append(found, string(message.Body))
		}
	}
	slices.Sort(found)
	return found, nil
}

func sorted(count int) []string {
	found := numbered(count)
	slices.Sort(found)
	return found
}

// whileKilled calls a function with rising numbers while it kills the leader of the topic's group. It returns the next number.
func whileKilled(p *play, first int, write func(number int) error) (int, error) {
	killed := make(chan error, 1)
	go func() { killed <- p.do("kill", "topic", "leader") }()
	for number := first; ; number++ {
		select {
		case err := <-killed:
			return number, err
		default:
		}
		if err := write(number); err != nil {
			return number, errors.Join(err, <-killed)
		}
	}
}

// throughKill writes while it kills the leader of the topic's group, and many more at once. It returns the number of messages.
func throughKill(p *play, topic *pixiu.Topic) (int, error) {
	count, err := whileKilled(p, 0, func(number int) error { return written(p, topic, number, 1, 5) })
	return count + 200, errors.Join(err, written(p, topic, count, 200, 5))
}

// handled acknowledges what a member gets, until it has got so many messages, and the channel has none that is not acknowledged.
func handled(p *play, px *pixiu.Client, topic *pixiu.Topic, member *pixiu.ChannelMember, count int) error {
	var mu sync.Mutex
	came, failed := map[string]bool{}, make(chan error, 1)
	go func() {
		for {
			message, err := member.Next(p.ctx)
			if err == nil {
				_, err = message.Ack(p.ctx) // false of one whose answer the leader's end took: it may be acknowledged
			}
			if err != nil {
				failed <- err
				return
			}
			mu.Lock()
			came[string(message.Body)] = true
			mu.Unlock()
		}
	}()
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		parts, err := px.Topics().ChannelState(p.ctx, topic.Name, "billing")
		if err != nil {
			return err
		}
		unacknowledged := uint64(0)
		for _, part := range parts {
			unacknowledged += part.Unacknowledged
		}
		mu.Lock()
		found := len(came)
		mu.Unlock()
		if found == count && unacknowledged == 0 {
			return nil
		}
		select {
		case err := <-failed:
			return err
		default:
		}
		if time.Now().After(end) {
			return fmt.Errorf("%d of %d messages came, and %d are not acknowledged", found, count, unacknowledged)
		}
	}
}

// loaded writes rows from `first` to before `end` under ten keys by a writer with a name. It returns its progress when it opened.
func loaded(p *play, topic *pixiu.Topic, first, end int) (progress uint64, err error) {
	writer, err := topic.Writer(p.ctx, "loader")
	if err != nil {
		return 0, err
	}
	for row := first; row < end; row++ {
		if _, err := rowSoon(p, writer, row); err != nil {
			return 0, err
		}
	}
	return writer.Progress(), writer.Close()
}

// rowSoon writes a row under one of ten keys by a writer with a name, without waiting.
func rowSoon(p *play, writer *pixiu.TopicWriter, row int) (*pixiu.TopicReceipt, error) {
	return writer.SendSoon(p.ctx, fmt.Appendf(nil, "m%d", row), pixiu.Key(fmt.Sprintf("k%d", row%10)), pixiu.Progress(uint64(row)))
}

// again is the topic for another client.
func again(p *play, topic *pixiu.Topic) (*pixiu.Topic, error) {
	px, err := p.client(pixiu.Options{})
	if err != nil {
		return nil, err
	}
	return px.Topic(topic.Name), nil
}

// row writes one message by a writer with a name.
func row(p *play, writer *pixiu.TopicWriter, number uint64) error {
	_, err := writer.Send(p.ctx, fmt.Appendf(nil, "m%d", number), pixiu.Key("k"), pixiu.Progress(number))
	return err
}

// wholly reads everything: so many messages, each once, in order for each key, and nothing more.
func wholly(p *play, topic *pixiu.Topic, count int) error {
	reader, err := inOrder(p, topic, pixiu.Earliest(), count)
	if err != nil {
		return err
	}
	if _, err := topic.Send(p.ctx, []byte("end")); err != nil {
		return err
	}
	message, err := reader.Next(p.ctx)
	return errors.Join(err, expect(err == nil && string(message.Body) == "end", "%+v is too much", message))
}

func init() {
	scenarios["topics/writer_resumes"] = func(p *play) error {
		_, topic, err := made(p, 4, pixiu.TopicSettings{})
		if err != nil {
			return err
		}
		if progress, err := loaded(p, topic, 1, 301); err != nil || progress != 0 {
			return errors.Join(err, fmt.Errorf("progress %d of a new writer", progress))
		}
		other, err := again(p, topic)
		if err != nil {
			return err
		}
		progress, err := loaded(p, other, 1, 401) // all rows again, of which those that are stored are passed over
		if err != nil || progress == 0 || progress > 300 {
			return errors.Join(err, fmt.Errorf("progress %d of 300", progress))
		}
		if _, err := loaded(p, other, int(progress)+1, 501); err != nil {
			return err
		}
		return wholly(p, topic, 500)
	}
	scenarios["topics/writer_stale"] = func(p *play) error {
		_, topic, err := made(p, 2, pixiu.TopicSettings{})
		if err != nil {
			return err
		}
		first, err := topic.Writer(p.ctx, "loader")
		if err := errors.Join(err, row(p, first, 1)); err != nil {
			return err
		}
		other, err := again(p, topic)
		if err != nil {
			return err
		}
		second, err := other.Writer(p.ctx, "loader")
		if err := errors.Join(err, row(p, second, 2), kindOf(row(p, first, 3), pixiu.ErrStaleWriter), kindOf(row(p, first, 4), pixiu.ErrStaleWriter),
			row(p, second, 5), kindOf(first.Close(), pixiu.ErrStaleWriter), second.Close()); err != nil {
			return err
		}
		return wholly(p, topic, 3)
	}
	scenarios["topics/writer_taken_over"] = func(p *play) error {
		_, topic, err := made(p, 4, pixiu.TopicSettings{})
		if err != nil {
			return err
		}
		first, err := topic.Writer(p.ctx, "loader")
		if err != nil {
			return err
		}
		var receipts []*pixiu.TopicReceipt
		for row := 1; row <= 2_000; row++ {
			receipt, err := first.SendSoon(p.ctx, fmt.Appendf(nil, "m%d", row), pixiu.Key(fmt.Sprintf("k%d", row%10)), pixiu.Progress(uint64(row)))
			if err != nil {
				return err
			}
			receipts = append(receipts, receipt)
		}
		if err := receipts[200].Wait(p.ctx); err != nil {
			return err
		}
		other, err := again(p, topic)
		if err != nil {
			return err
		}
		if _, err := loaded(p, other, 1, 3_001); err != nil {
			return err
		}
		return wholly(p, topic, 3_000)
	}
	scenarios["topics/writer_progress"] = func(p *play) error {
		_, topic, err := made(p, 2, pixiu.TopicSettings{})
		if err != nil {
			return err
		}
		writer, err := topic.Writer(p.ctx, "loader")
		if err := errors.Join(err, row(p, writer, 2)); err != nil {
			return err
		}
		_, err = topic.Send(p.ctx, nil, pixiu.Progress(3))
		return errors.Join(kindOf(row(p, writer, 1), pixiu.ErrInvalidArgument), kindOf(row(p, writer, 2), pixiu.ErrInvalidArgument),
			kindOf(row(p, writer, 0), pixiu.ErrInvalidArgument), kindOf(err, pixiu.ErrInvalidArgument), writer.Close())
	}
	scenarios["reconnect/named_writer"] = func(p *play) error {
		_, topic, err := made(p, 4, pixiu.TopicSettings{})
		if err != nil {
			return err
		}
		if _, err := loaded(p, topic, 1, 51); err != nil {
			return err
		}
		writer, err := topic.Writer(p.ctx, "loader")
		if err != nil {
			return err
		}
		end, err := whileKilled(p, 51, func(row int) error {
			receipt, err := rowSoon(p, writer, row)
			if err != nil {
				return err
			}
			return receipt.Wait(p.ctx)
		})
		for row := end; err == nil && row < end+1_000; row++ {
			_, err = rowSoon(p, writer, row)
		}
		if err := errors.Join(err, writer.Close()); err != nil {
			return err
		}
		other, err := again(p, topic)
		if err != nil {
			return err
		}
		_, err = loaded(p, other, 1, end+2_000)
		return errors.Join(err, p.do("healthy"), wholly(p, topic, end+1_999))
	}
	scenarios["topics/create_describe_delete"] = func(p *play) error {
		px, topic, err := made(p, 4, pixiu.TopicSettings{Retention: time.Hour})
		if err != nil {
			return err
		}
		info, err := px.Topics().Describe(p.ctx, topic.Name)
		if err := errors.Join(err, expect(err == nil && len(info.OpenParts()) == 4 && info.Settings.Retention == time.Hour, "%+v", info)); err != nil {
			return err
		}
		listed, err := px.Topics().List(p.ctx, topic.Name)
		if err := errors.Join(err, expect(len(listed) == 1 && listed[0].Name == topic.Name, "%v", listed)); err != nil {
			return err
		}
		if err := px.Topics().Delete(p.ctx, topic.Name, false); err != nil {
			return err
		}
		listed, err = px.Topics().List(p.ctx, topic.Name)
		return errors.Join(err, expect(len(listed) == 0, "%v", listed))
	}
	scenarios["topics/exists"] = func(p *play) error {
		px, topic, err := made(p, 1, pixiu.TopicSettings{})
		if err != nil {
			return err
		}
		_, err = px.Topics().Create(p.ctx, topic.Name, 1, pixiu.TopicSettings{})
		return kindOf(err, pixiu.ErrTopicExists)
	}
	scenarios["topics/unknown"] = func(p *play) error {
		px, err := p.client(pixiu.Options{})
		if err != nil {
			return err
		}
		_, err = px.Topic(p.topic()).Send(p.ctx, []byte("x"))
		return kindOf(err, pixiu.ErrUnknownTopic)
	}
	scenarios["topics/positions"] = func(p *play) error {
		_, topic, err := made(p, 2, pixiu.TopicSettings{})
		if err != nil {
			return err
		}
		for _, key := range []string{"a", "b", "c"} {
			receipt, err := topic.Send(p.ctx, []byte(key), pixiu.Key(key), pixiu.Header("of", []byte(key)))
			if err != nil {
				return err
			}
			part, offset, known := receipt.Position()
			reader, err := topic.Reader(p.ctx, pixiu.FromPosition(map[uint32]uint64{part: offset}))
			if err != nil {
				return err
			}
			found, err := reader.Next(p.ctx)
			for err == nil && found.Part != part { // parts that a position does not name are read from their beginning
				found, err = reader.Next(p.ctx)
			}
			if err := errors.Join(err, reader.Close(), expect(known && err == nil && found.Offset == offset &&
				string(found.Body) == key && string(found.Key) == key && string(found.Headers["of"]) == key, "%+v", found)); err != nil {
				return err
			}
		}
		return nil
	}
	scenarios["topics/key_order"] = func(p *play) error {
		_, topic, err := made(p, 4, pixiu.TopicSettings{})
		if err := errors.Join(err, written(p, topic, 0, 300, 10)); err != nil {
			return err
		}
		_, err = inOrder(p, topic, pixiu.Earliest(), 300)
		return err
	}
	scenarios["topics/reader_latest"] = func(p *play) error {
		_, topic, err := made(p, 2, pixiu.TopicSettings{})
		if err := errors.Join(err, written(p, topic, 0, 10, 10)); err != nil {
			return err
		}
		reader, err := topic.Reader(p.ctx, pixiu.Latest())
		if err := errors.Join(err, written(p, topic, 10, 1, 10)); err != nil {
			return err
		}
		message, err := reader.Next(p.ctx)
		return errors.Join(err, expect(err == nil && string(message.Body) == "m10", "%+v", message))
	}
	scenarios["topics/reader_position"] = func(p *play) error {
		_, topic, err := made(p, 1, pixiu.TopicSettings{})
		if err := errors.Join(err, written(p, topic, 0, 10, 1)); err != nil {
			return err
		}
		reader, err := inOrder(p, topic, pixiu.Earliest(), 4)
		if err != nil {
			return err
		}
		next, err := topic.Reader(p.ctx, pixiu.FromPosition(reader.Position()))
		if err != nil {
			return err
		}
		message, err := next.Next(p.ctx)
		return errors.Join(err, expect(err == nil && string(message.Body) == "m4", "%+v", message))
	}
	scenarios["topics/channel_ack"] = func(p *play) error {
		_, topic, err := made(p, 2, pixiu.TopicSettings{})
		if err := errors.Join(err, written(p, topic, 0, 20, 10)); err != nil {
			return err
		}
		member, err := topic.Channel(p.ctx, "billing")
		if err != nil {
			return err
		}
		found, err := taken(p, member, 20)
		if err := errors.Join(err, same(found, sorted(20)), member.Close(), written(p, topic, 20, 1, 10)); err != nil {
			return err
		}
		if member, err = topic.Channel(p.ctx, "billing"); err != nil {
			return err
		}
		found, err = taken(p, member, 1)
		return errors.Join(err, same(found, []string{"m20"}))
	}
	scenarios["topics/channel_unacknowledged"] = func(p *play) error {
		_, topic, err := made(p, 1, pixiu.TopicSettings{})
		if err := errors.Join(err, written(p, topic, 0, 1, 1)); err != nil {
			return err
		}
		member, err := topic.Channel(p.ctx, "billing")
		if err != nil {
			return err
		}
		if _, err := member.Next(p.ctx); err != nil {
			return err
		}
		if err := member.Close(); err != nil {
			return err
		}
		if member, err = topic.Channel(p.ctx, "billing"); err != nil {
			return err
		}
		message, err := member.Next(p.ctx)
		return errors.Join(err, expect(err == nil && string(message.Body) == "m0" && message.Attempts > 1, "%+v", message))
	}
	scenarios["topics/channel_shared"] = func(p *play) error {
		_, topic, err := made(p, 4, pixiu.TopicSettings{})
		if err != nil {
			return err
		}
		var members []*pixiu.ChannelMember
		came := make(chan string)
		for range 2 {
			member, err := topic.Channel(p.ctx, "billing", pixiu.Credit(8))
			if err != nil {
				return err
			}
			members = append(members, member)
			go func() {
				_ = member.Run(p.ctx, func(message *pixiu.ChannelMessage) error { came <- string(message.Body); return nil })
			}()
		}
		if err := written(p, topic, 0, 100, 50); err != nil {
			return err
		}
		var found []string
		for len(found) < 100 {
			select {
			case text := <-came:
				found = append(found, text)
			case <-time.After(patience):
				return fmt.Errorf("only %d messages came", len(found))
			}
		}
		slices.Sort(found)
		return errors.Join(same(found, sorted(100)), members[0].Close(), members[1].Close())
	}
	scenarios["topics/channels_independent"] = func(p *play) error {
		_, topic, err := made(p, 2, pixiu.TopicSettings{})
		if err := errors.Join(err, written(p, topic, 0, 10, 10)); err != nil {
			return err
		}
		for _, channel := range []string{"billing", "audit"} {
			member, err := topic.Channel(p.ctx, channel)
			if err != nil {
				return err
			}
			found, err := taken(p, member, 10)
			if err := errors.Join(err, same(found, sorted(10))); err != nil {
				return err
			}
		}
		return nil
	}
	scenarios["topics/channel_nack"] = func(p *play) error {
		_, topic, err := made(p, 1, pixiu.TopicSettings{})
		if err := errors.Join(err, written(p, topic, 0, 1, 1)); err != nil {
			return err
		}
		member, err := topic.Channel(p.ctx, "billing")
		if err != nil {
			return err
		}
		message, err := member.Next(p.ctx)
		if err != nil {
			return err
		}
		counts, err := message.Nack(p.ctx, 0)
		if err := errors.Join(err, expect(counts, "it did not count")); err != nil {
			return err
		}
		message, err = member.Next(p.ctx)
		return errors.Join(err, expect(err == nil && message.Attempts == 2, "%+v", message))
	}
	scenarios["topics/channel_reject_to_dead_letters"] = func(p *play) error {
		px, topic, err := made(p, 1, pixiu.TopicSettings{})
		if err := errors.Join(err, written(p, topic, 0, 2, 1)); err != nil {
			return err
		}
		member, err := topic.Channel(p.ctx, "billing")
		if err != nil {
			return err
		}
		message, err := member.Next(p.ctx)
		if err != nil {
			return err
		}
		if counts, err := message.Reject(p.ctx, "no such customer"); err != nil || !counts {
			return fmt.Errorf("%v %w", counts, err)
		}
		found, err := taken(p, member, 1)
		if err := errors.Join(err, same(found, []string{"m1"})); err != nil {
			return err
		}
		letters, err := px.Topics().DeadLetters(p.ctx, topic.Name, "billing", 0)
		if err := errors.Join(err, expect(len(letters) == 1 && strings.Contains(letters[0].Reason, "no such customer") &&
			string(letters[0].Message.Body) == "m0", "%+v", letters)); err != nil {
			return err
		}
		count, err := px.Topics().Resend(p.ctx, topic.Name, "billing")
		if err := errors.Join(err, expect(count == 1, "%d resent", count)); err != nil {
			return err
		}
		found, err = taken(p, member, 1)
		return errors.Join(err, same(found, []string{"m0"}))
	}
	scenarios["topics/channel_attempts_used_up"] = func(p *play) error {
		px, topic, err := made(p, 1, pixiu.TopicSettings{})
		if err := errors.Join(err, written(p, topic, 0, 1, 1)); err != nil {
			return err
		}
		member, err := topic.Channel(p.ctx, "billing", pixiu.CreateChannel(pixiu.ChannelInfo{MaxAttempts: 2}))
		if err != nil {
			return err
		}
		for range 2 {
			message, err := member.Next(p.ctx)
			if err != nil {
				return err
			}
			if counts, err := message.Nack(p.ctx, 0); err != nil || !counts {
				return fmt.Errorf("%v %w", counts, err)
			}
		}
		letters, err := px.Topics().DeadLetters(p.ctx, topic.Name, "billing", 0)
		return errors.Join(err, expect(len(letters) == 1 && letters[0].Attempts == 2, "%+v", letters))
	}
	scenarios["topics/compacted_last"] = func(p *play) error {
		_, topic, err := made(p, 2, pixiu.TopicSettings{Compact: time.Hour})
		if err != nil {
			return err
		}
		for _, body := range []string{"one", "two", ""} {
			if _, err := topic.Send(p.ctx, []byte(body), pixiu.Key("user-7")); err != nil {
				return err
			}
			last, err := topic.Last(p.ctx, []byte("user-7"))
			if err != nil {
				return err
			}
			if err := expect((body == "") == (last == nil) && (last == nil || string(last.Body) == body), "%+v after %q", last, body); err != nil {
				return err
			}
		}
		return nil
	}
	scenarios["topics/resized"] = func(p *play) error {
		px, topic, err := made(p, 1, pixiu.TopicSettings{})
		if err := errors.Join(err, written(p, topic, 0, 100, 10)); err != nil {
			return err
		}
		done := make(chan error, 1)
		go func() { done <- written(p, topic, 100, 300, 10) }()
		_, err = px.Topics().Resize(p.ctx, topic.Name, []uint32{1}, []uint32{32768}, nil)
		if err := errors.Join(err, <-done, written(p, topic, 400, 100, 10)); err != nil {
			return err
		}
		_, err = inOrder(p, topic, pixiu.Earliest(), 500)
		return err
	}
	scenarios["interop/topics"] = func(p *play) error {
		_, topic, err := made(p, 1, pixiu.TopicSettings{})
		if err != nil {
			return err
		}
		if _, err := topic.Send(p.ctx, []byte("one"), pixiu.Key("go")); err != nil {
			return err
		}
		if err := p.do("write", topic.Name, "python", "two"); err != nil {
			return err
		}
		heard, err := p.ask("read", topic.Name, 2)
		if err := errors.Join(err, expect(heard == "go=one python=two", "%q", heard)); err != nil {
			return err
		}
		reader, err := topic.Reader(p.ctx, pixiu.Earliest())
		if err != nil {
			return err
		}
		for _, wanted := range []string{"go=one", "python=two"} {
			message, err := reader.Next(p.ctx)
			if err != nil {
				return err
			}
			if found := string(message.Key) + "=" + string(message.Body); found != wanted {
				return fmt.Errorf("%s, not %s", found, wanted)
			}
		}
		return nil
	}
	scenarios["reconnect/topic_writer"] = func(p *play) error {
		_, topic, err := made(p, 2, pixiu.TopicSettings{})
		if err != nil {
			return err
		}
		count, err := throughKill(p, topic)
		return errors.Join(err, p.do("healthy"), wholly(p, topic, count))
	}
	scenarios["reconnect/topic_reader"] = func(p *play) error {
		_, topic, err := made(p, 2, pixiu.TopicSettings{})
		if err != nil {
			return err
		}
		reader, err := topic.Reader(p.ctx, pixiu.Earliest())
		if err != nil {
			return err
		}
		if err := errors.Join(written(p, topic, 0, 50, 5), ordered(p, reader, 50)); err != nil {
			return err
		}
		if err := errors.Join(p.do("kill", "topic", "leader"), written(p, topic, 50, 200, 5)); err != nil {
			return err
		}
		return errors.Join(ordered(p, reader, 200), p.do("healthy"))
	}
	scenarios["reconnect/channel_member"] = func(p *play) error {
		px, topic, err := made(p, 2, pixiu.TopicSettings{})
		if err != nil {
			return err
		}
		member, err := topic.Channel(p.ctx, "billing")
		if err != nil {
			return err
		}
		if err := written(p, topic, 0, 50, 5); err != nil {
			return err
		}
		done := make(chan error, 1)
		go func() { done <- handled(p, px, topic, member, 250) }()
		if err := errors.Join(p.do("kill", "topic", "leader"), written(p, topic, 50, 200, 5)); err != nil {
			return err
		}
		return errors.Join(<-done, p.do("healthy"))
	}
}

package pixiu

import (
	"cmp"
	"context"
	"encoding/binary"
	"maps"
	"slices"
	"sort"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"pixiu/internal/codec"
	wire "pixiu/wire/v1"
)

const positionsAtOnce = 5_000 // parts that are asked for at once

// Progress is the application's number of a message, which rises with every message, for writers with a name.
func Progress(number uint64) WriteOption { return func(w *writing) { w.progress = number } }

func errNoName() *Error {
	return fail(ErrInvalidArgument, "progress is kept for writers with a name: topic.Writer(ctx, name)")
}

// A TopicWriter is a writer of a durable topic with a name. It stores nothing twice over restarts of its program: after one, go on
// after its Progress, with the same messages in the same order.
type TopicWriter struct {
	Name   string
	sender *topicSender
}

// Writer opens a writer with a name, and learns what it has stored. One process at a time may use a name: the one that opens it
// last goes on, and an earlier one fails with ErrStaleWriter from then on.
func (t *Topic) Writer(ctx context.Context, name string) (*TopicWriter, error) {
	c := t.client
	if err := checkName(name, "topic's writer"); err != nil {
		return nil, err
	}
	if err := checkName(t.Name, "topic"); err != nil {
		return nil, err
	}
	s := c.newTopicSender(t.Name, codec.Hash(name))
	m, err := c.topicMaps.follow(ctx, t.Name, 0, s.user)
	if err == nil {
		err = s.resume(ctx, m)
	}
	if err != nil {
		c.topicMaps.leave(t.Name, s.user)
		return nil, err
	}
	s.begin(m)
	if m, err = c.topicMaps.topic(ctx, t.Name); err == nil {
		s.onTopic(m) // it may have changed meanwhile
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		c.topicMaps.leave(t.Name, s.user)
		return nil, errClosed()
	}
	c.loaders[s] = struct{}{}
	c.tasks.Go(s.run)
	return &TopicWriter{name, s}, nil
}

// Progress is the number up to which everything was stored when the writer was opened; 0: begin with the first message. Later
// messages may be stored in part: the writer knows which, and passes over them.
func (w *TopicWriter) Progress() uint64 {
	least := uint64(0)
	for _, each := range w.sender.resumed.ranges {
		if each.progress > 0 && (least == 0 || each.progress < least) {
			least = each.progress
		}
	}
	return least
}

// Send stores a message, and waits until that is confirmed at its level.
func (w *TopicWriter) Send(ctx context.Context, body []byte, options ...WriteOption) (*TopicReceipt, error) {
	receipt, err := w.SendSoon(ctx, body, options...)
	if err != nil {
		return nil, err
	}
	return receipt, receipt.Wait(ctx)
}

// SendSoon queues a message, waiting only while the queue is full, and gives a receipt for its outcome. That of a message which is
// stored already is resolved at once.
func (w *TopicWriter) SendSoon(ctx context.Context, body []byte, options ...WriteOption) (*TopicReceipt, error) {
	found, inTurn, err := topicDraft(body, options)
	if err != nil {
		return nil, err
	}
	if inTurn && found.progress > 0 {
		// The same when it is sent again after a restart.
		found.encoded.Slot, inTurn = codec.SlotOf(binary.LittleEndian.AppendUint64(nil, found.progress)), false
	}
	if err := w.sender.offer(ctx, found, inTurn); err != nil {
		return nil, err
	}
	return &TopicReceipt{w.sender, found}, nil
}

// Close waits until everything is confirmed or has failed, and ends the writer. It returns the first failure.
func (w *TopicWriter) Close() error {
	s := w.sender
	ctx, cancel := context.WithTimeout(context.Background(), s.client.options.TopicTimeout)
	defer cancel()
	err := s.idle(ctx)
	s.mu.Lock()
	first := s.firstError
	s.mu.Unlock()
	s.end(fail(ErrNotConnected, "the writer is closed; open another one"))
	s.client.mu.Lock()
	delete(s.client.loaders, s)
	s.client.mu.Unlock()
	if first != nil {
		return first
	}
	return err
}

// resume learns what a writer has stored, and shuts out those who have opened it before.
func (s *topicSender) resume(ctx context.Context, m *topicMap) error {
	groups := map[uint32][]uint32{}
	for _, number := range slices.Sorted(maps.Keys(m.parts)) {
		group := m.parts[number].Group
		groups[group] = append(groups[group], number)
	}
	epoch := uint64(time.Now().UnixMicro())
	for group := range groups {
		found, err := s.positions(ctx, m, group, nil, 0)
		if err != nil {
			return err
		}
		epoch = max(epoch, found.Epoch+1)
	}
	stored := map[uint32]storedIn{}
	for group, parts := range groups {
		for asked := range slices.Chunk(parts, positionsAtOnce) {
			found, err := s.positions(ctx, m, group, asked, epoch)
			if err != nil {
				return err
			}
			if len(found.Positions) != len(asked) {
				return fail(ErrUnavailable, "topic group %d answered for %d of %d parts", group, len(found.Positions), len(asked))
			}
			for at, each := range found.Positions {
				if !each.Here {
					continue
				}
				inherited := map[uint32]uint64{}
				for _, before := range each.Inherited {
					inherited[before.Part] = before.Progress
				}
				stored[asked[at]] = storedIn{each.Position, each.Progress, inherited}
			}
		}
	}
	s.epoch, s.resumed = epoch, newResumed(m, stored)
	return nil
}

func (s *topicSender) positions(ctx context.Context, m *topicMap, group uint32, parts []uint32, epoch uint64) (*wire.WriterPositionsReply, error) {
	request := &wire.WriterPositionsRequest{Topic: m.id, Writer: s.writer, Parts: parts, Epoch: epoch}
	return askLeader(ctx, s.client, s.name, group, askFor, leaderFor,
		func(ctx context.Context, stub wire.TopicLogClient, trailer *metadata.MD) (*wire.WriterPositionsReply, *wire.TopicRefusal, error) {
			reply, err := stub.Positions(ctx, request, grpc.Trailer(trailer))
			if text, stale := strings.CutPrefix(status.Convert(err).Message(), "STALE_WRITER: "); stale { // somebody opens it at the same time
				return nil, &wire.TopicRefusal{Code: "STALE_WRITER", Text: text}, nil
			}
			return reply, nil, err
		})
}

// storedIn is the state of a writer in a part.
type storedIn struct {
	position  uint64            // of its last message; 0: none
	progress  uint64            // after that; without a message the highest one in the parts before it
	inherited map[uint32]uint64 // progress in the parts before it, of all generations
}

// leftBy is the progress that a part left, or those before it.
func (s storedIn) leftBy(part uint32) uint64 {
	found, known := s.inherited[part]
	if known {
		return found
	}
	for number, each := range s.inherited {
		if number < part {
			found = max(found, each)
		}
	}
	return found
}

// slotsFrom: from this slot on everything up to progress is stored.
type slotsFrom struct {
	low      int
	progress uint64
}

// resumed is the progress by slots that a writer had made when it opened. A part keeps the highest one up to which it has all of the
// writer's messages for its slots. For a slot, the highest of its part and of those before it counts.
type resumed struct {
	parts  map[uint32]Part
	stored map[uint32]storedIn
	ranges []slotsFrom
}

func newResumed(m *topicMap, stored map[uint32]storedIn) *resumed {
	r := &resumed{parts: m.parts, stored: stored}
	for _, part := range m.open { // by their slots
		r.ranges = append(r.ranges, r.within(part.Number, part.Low, part.High)...)
	}
	return r
}

// within are the slots [low, high) of a part.
func (r *resumed) within(number uint32, low, high int) []slotsFrom {
	own, least, gone := r.stored[number], uint64(0), []uint64(nil)
	if own.position > 0 {
		least = own.progress
	}
	var kept []Part
	for _, parent := range r.parts[number].Parents {
		if part, known := r.parts[parent]; !known {
			gone = append(gone, own.leftBy(parent))
		} else if part.Low < high && part.High > low {
			kept = append(kept, part)
		}
	}
	slices.SortFunc(kept, func(a, b Part) int { return cmp.Compare(a.Low, b.Low) })
	rest := least
	if len(gone) > 0 {
		rest = max(least, slices.Min(gone)) // which slots a parent had that is gone is not known: of several, the least counts
	}
	var found []slotsFrom
	at := low
	for _, part := range kept {
		if part.Low > at {
			found = append(found, slotsFrom{at, rest})
		}
		for _, each := range r.within(part.Number, max(part.Low, low), min(part.High, high)) {
			found = append(found, slotsFrom{each.low, max(each.progress, least)})
		}
		at = min(part.High, high)
	}
	if at < high {
		found = append(found, slotsFrom{at, rest})
	}
	return found
}

// at is the place of a slot's range.
func (r *resumed) at(slot int) int {
	return sort.Search(len(r.ranges), func(at int) bool { return r.ranges[at].low > slot }) - 1
}

// of is the progress up to which everything for a slot is stored; 0: nothing is known to be.
func (r *resumed) of(slot int) uint64 { return r.ranges[r.at(slot)].progress }

// covers: something is known to be stored for each of the slots [low, high).
func (r *resumed) covers(low, high int) bool {
	return !slices.ContainsFunc(r.ranges[r.at(low):r.at(high-1)+1], func(each slotsFrom) bool { return each.progress == 0 })
}

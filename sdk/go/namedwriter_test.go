package pixiu

import (
	"testing"

	"pixiu/internal/codec"
)

func mapWith(parts ...Part) *topicMap {
	m := &topicMap{parts: map[uint32]Part{}}
	for _, each := range parts {
		m.parts[each.Number] = each
	}
	m.sort()
	return m
}

var merged = Part{Number: 3, High: codec.Slots, Parents: []uint32{1, 2}}

// Of two parts that were merged, one may have had more than the writer has sent to their child so far.
func TestProgressOfAMergedPartIsThatOfEachParent(t *testing.T) {
	half := codec.Slots / 2
	m := mapWith(Part{Number: 1, High: half, Sealed: true}, Part{Number: 2, Low: half, High: codec.Slots, Sealed: true}, merged)
	for _, each := range []struct {
		stored      map[uint32]storedIn
		first, last uint64
	}{
		{map[uint32]storedIn{1: {position: 3, progress: 10}, 2: {position: 1, progress: 4}, 3: {progress: 10}}, 10, 4},
		{map[uint32]storedIn{1: {position: 3, progress: 500}, 2: {position: 1, progress: 300}, 3: {position: 2, progress: 350}}, 500, 350},
		{map[uint32]storedIn{1: {position: 3, progress: 10}}, 10, 0},
	} {
		r := newResumed(m, each.stored)
		if r.of(0) != each.first || r.of(codec.Slots-1) != each.last {
			t.Errorf("%v: %d, %d", each.stored, r.of(0), r.of(codec.Slots-1))
		}
		if r.covers(0, half) != (each.first > 0) || r.covers(0, codec.Slots) != (each.last > 0) {
			t.Errorf("%v: it covers something else", each.stored)
		}
	}
}

func TestProgressOfParentsThatAreGoneIsTheLeastOfTheirs(t *testing.T) {
	inherited := map[uint32]uint64{1: 500, 2: 300}
	for _, each := range []struct {
		stored storedIn
		wanted uint64
	}{{storedIn{0, 500, inherited}, 300}, {storedIn{2, 350, inherited}, 350}} {
		w := &TopicWriter{sender: &topicSender{resumed: newResumed(mapWith(merged), map[uint32]storedIn{3: each.stored})}}
		if found := w.Progress(); found != each.wanted {
			t.Errorf("%d, not %d", found, each.wanted)
		}
	}
}

package codec

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"strconv"
	"testing"
)

type vectors struct {
	Records []struct {
		Name                    string
		Kind, Flags, Type       byte
		Lifetime                uint16 `json:"lifetime_min"`
		Snowflake               string `json:"snowflake_id"`
		Key, Sender             string
		Extension, Body, Record string
	}
	Batch struct {
		Count int
		Bytes string
	}
	Snowflakes []struct {
		TimeMs           string `json:"time_ms"`
		Worker, Sequence uint32
		ID               string
	} `json:"snowflake_ids"`
	Topics []struct{ Topic, Room string } `json:"mqtt_topics"`
	Slots  []struct {
		Key  string
		Slot int
	}
	Blocks []struct {
		Name                    string
		Topic, Part             uint32
		Writer, First, Progress string
		Block                   string
		Stored                  string `json:"stored_at_4096"`
		Messages                []struct {
			Body        string
			Slot        int
			Key, Tag    *string
			Headers     [][2]string
			LoadTest    bool    `json:"load_test"`
			EventUs     *string `json:"event_at_us"`
			ExpiresInS  *uint32 `json:"expires_in_s"`
			DeliverAtUs *string `json:"deliver_at_us"`
		}
	}
	Envelopes []struct {
		MsgID string `json:"msg_id"`
		Seq   string
		UIN   string
		Lane  byte
		Flags byte
		Bytes string
	}
}

func number(text string) uint64 {
	found, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		panic(err)
	}
	return found
}

func unhex(text string) []byte {
	found, err := hex.DecodeString(text)
	if err != nil {
		panic(err)
	}
	return found
}

func load(t *testing.T) (found vectors) {
	place := os.Getenv("PIXIU_VECTORS")
	if place == "" {
		place = "../../../../proto/vectors.json"
	}
	text, err := os.ReadFile(place)
	if err == nil {
		err = json.Unmarshal(text, &found)
	}
	if err != nil || len(found.Records) == 0 || len(found.Blocks) == 0 || len(found.Envelopes) == 0 || len(found.Topics) == 0 {
		t.Fatal("no vectors: ", err)
	}
	return found
}

func TestRecords(t *testing.T) {
	for _, vector := range load(t).Records {
		wanted := unhex(vector.Record)
		read, rest, err := Decode(append(unhex(vector.Record), 7))
		if err != nil || len(rest) != 1 {
			t.Fatal(vector.Name, err, rest)
		}
		made := Record{
			Kind: vector.Kind, Flags: vector.Flags, Type: vector.Type, LifetimeMin: vector.Lifetime,
			Snowflake: number(vector.Snowflake), Key: number(vector.Key), Sender: number(vector.Sender),
			Extension: unhex(vector.Extension), Body: unhex(vector.Body), Stamps: read.Stamps,
		}
		if !bytes.Equal(made.Encode(), wanted) || !bytes.Equal(read.Encode(), wanted) {
			t.Errorf("%s: %x and %x, not %x", vector.Name, made.Encode(), read.Encode(), wanted)
		}
		if len(vector.Body) > 0 {
			wanted[HeaderSize+len(vector.Extension)/2] ^= 1
			if _, rest, err := Decode(wanted); err == nil || rest == nil {
				t.Error(vector.Name, ": damage was not found, or its size not believed")
			}
		}
	}
}

func TestBatch(t *testing.T) {
	batch, count := unhex(load(t).Batch.Bytes), 0
	for rest := batch; len(rest) > 0; count++ {
		var err error
		if _, rest, err = Decode(rest); err != nil {
			t.Fatal(err)
		}
	}
	if count != load(t).Batch.Count {
		t.Error(count)
	}
}

func TestSnowflakes(t *testing.T) {
	for _, vector := range load(t).Snowflakes {
		id := Snowflake(int64(number(vector.TimeMs)), vector.Worker, vector.Sequence)
		if id != number(vector.ID) || SnowflakeMs(id) != int64(number(vector.TimeMs)) {
			t.Errorf("%d, not %s", id, vector.ID)
		}
	}
}

func TestRoomsOfTopics(t *testing.T) {
	for _, vector := range load(t).Topics {
		if len(vector.Topic) > 5 && (vector.Topic[:5] == "room/" || vector.Topic[:5] == "user/") || vector.Room == "" {
			continue
		}
		if room := TopicRoom(vector.Topic); vector.Room != strconv.FormatUint(room, 10) && vector.Topic[0] != '$' {
			t.Errorf("%s: %d, not %s", vector.Topic, room, vector.Room)
		}
	}
}

func TestSlots(t *testing.T) {
	for _, vector := range load(t).Slots {
		if slot := SlotOf(unhex(vector.Key)); slot != vector.Slot {
			t.Errorf("%q: %d, not %d", vector.Key, slot, vector.Slot)
		}
	}
}

func TestBlocks(t *testing.T) {
	for _, vector := range load(t).Blocks {
		var messages []Encoded
		stored, rest, err := DecodeStored(unhex(vector.Stored))
		if err != nil || len(rest) != 0 || stored.Base != 4096 || stored.Count != len(vector.Messages) {
			t.Fatal(vector.Name, err, stored)
		}
		for at, each := range vector.Messages {
			message := TopicMessage{Body: unhex(each.Body), Slot: each.Slot, LoadTest: each.LoadTest}
			if each.Key != nil {
				message.HasKey, message.Key = true, unhex(*each.Key)
			}
			if each.Tag != nil {
				message.Tag = *each.Tag
			}
			for _, header := range each.Headers {
				message.Headers = append(message.Headers, Header{header[0], unhex(header[1])})
			}
			if each.EventUs != nil {
				message.EventUs = int64(number(*each.EventUs))
			}
			if each.DeliverAtUs != nil {
				message.DeliverAtUs = int64(number(*each.DeliverAtUs))
			}
			if each.ExpiresInS != nil {
				message.ExpiresInS = *each.ExpiresInS
			}
			data, flags, err := EncodeTopicMessage(&message)
			if err != nil {
				t.Fatal(vector.Name, err)
			}
			messages = append(messages, Encoded{each.Slot, flags, data})
			read, err := DecodeTopicMessage(stored.Messages[at])
			if err != nil || !bytes.Equal(read.Body, message.Body) || !bytes.Equal(read.Key, message.Key) ||
				read.HasKey != message.HasKey || read.Tag != message.Tag || len(read.Headers) != len(message.Headers) ||
				read.EventUs != message.EventUs || read.DeliverAtUs != message.DeliverAtUs || read.Slot != each.Slot {
				t.Error(vector.Name, read, err)
			}
		}
		block := JoinBlock(messages, vector.Topic, vector.Part, number(vector.Writer), number(vector.First), number(vector.Progress))
		if !bytes.Equal(block, unhex(vector.Block)) {
			t.Errorf("%s: %x, not %s", vector.Name, block, vector.Block)
		}
	}
}

func TestEnvelopes(t *testing.T) {
	for _, vector := range load(t).Envelopes {
		read, rest, err := DecodeEnvelope(unhex(vector.Bytes))
		if err != nil || len(rest) != 0 || read.MsgID != number(vector.MsgID) || read.Seq != number(vector.Seq) ||
			read.UIN != number(vector.UIN) || read.Lane != vector.Lane || read.Gap != (vector.Flags&1 != 0) {
			t.Error(read, err)
		}
	}
}

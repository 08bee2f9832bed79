// Package codec lays out records, envelopes and blocks of durable topics. Source: docs/protocol.md, "Record"; docs/topics.md, "Blocks".
package codec

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"time"
	"unicode/utf8"

	"github.com/zeebo/xxh3"
)

// Kinds and flags of records.
const (
	KindRoom   = 1
	KindSignal = 2
	KindChat   = 3
	KindMail   = 4

	FlagTraced    = 1
	FlagLoadTest  = 2
	FlagToRoom    = 4
	FlagTopic     = 16
	FlagDerivedID = 32

	HeaderSize     = 40
	MaxRecordBytes = 1 << 20
	MaxExtension   = 65_535
	stampSize      = 24
	envelopeSize   = 32
	envelopeGap    = 1
	envelopeAgain  = 2
)

// MaxRoom and MaxID are the highest RoomID and UIN.
const (
	MaxRoom = 1<<62 - 1
	MaxID   = 1<<63 - 1
)

var errCRC = errors.New("the record's lengths or its CRC are wrong: it was damaged on the way")

// A Record is one message. The body of a free topic's message begins with the topic (FlagTopic).
type Record struct {
	Kind, Flags, Type byte
	LifetimeMin       uint16
	Snowflake         uint64
	Key, Sender       uint64
	Extension, Body   []byte
	Stamps            []byte // of a traced record, with the count byte
}

// Encode lays a record out.
func (r *Record) Encode() []byte {
	size := HeaderSize + len(r.Extension) + len(r.Body) + len(r.Stamps)
	out := make([]byte, HeaderSize, size)
	binary.LittleEndian.PutUint32(out, uint32(size-4))
	out[4], out[5], out[6] = r.Kind, r.Flags, r.Type
	if len(r.Extension) > 0 {
		out[7] = 1
	}
	binary.LittleEndian.PutUint16(out[8:], uint16(len(r.Extension)))
	binary.LittleEndian.PutUint16(out[10:], r.LifetimeMin)
	crc := crc32.Update(crc32.ChecksumIEEE(r.Extension), crc32.IEEETable, r.Body)
	binary.LittleEndian.PutUint32(out[12:], crc)
	binary.LittleEndian.PutUint64(out[16:], r.Snowflake)
	binary.LittleEndian.PutUint64(out[24:], r.Key)
	binary.LittleEndian.PutUint64(out[32:], r.Sender)
	out = append(out, r.Extension...)
	out = append(out, r.Body...)
	return append(out, r.Stamps...)
}

// Decode takes the first record of a batch; rest is what follows it. A damaged record gives an error and, where its size can be
// believed, the rest.
func Decode(data []byte) (r Record, rest []byte, err error) {
	if len(data) < HeaderSize {
		return r, nil, errors.New("a record has at least 40 bytes")
	}
	size := int(binary.LittleEndian.Uint32(data)) + 4
	if size < HeaderSize || size > len(data) {
		return r, nil, fmt.Errorf("a record of %d bytes in %d", size, len(data))
	}
	rest = data[size:]
	extension := int(binary.LittleEndian.Uint16(data[8:]))
	end := size
	if data[5]&FlagTraced != 0 {
		end -= 1 + stampSize*int(data[size-1])
	}
	if end < HeaderSize+extension || crc32.ChecksumIEEE(data[HeaderSize:end]) != binary.LittleEndian.Uint32(data[12:]) {
		return r, rest, errCRC
	}
	r.Kind, r.Flags, r.Type = data[4], data[5], data[6]
	r.LifetimeMin = binary.LittleEndian.Uint16(data[10:])
	r.Snowflake = binary.LittleEndian.Uint64(data[16:])
	r.Key = binary.LittleEndian.Uint64(data[24:])
	r.Sender = binary.LittleEndian.Uint64(data[32:])
	// Without spare capacity: who appends to a message must not write into the next one.
	r.Extension = data[HeaderSize : HeaderSize+extension : HeaderSize+extension]
	r.Body = data[HeaderSize+extension : end : end]
	if end < size {
		r.Stamps = data[end:size]
	}
	return r, rest, nil
}

// SplitTopic takes the topic's name off a body.
func SplitTopic(body []byte) (topic string, rest []byte, err error) {
	if len(body) < 2 || 2+int(binary.BigEndian.Uint16(body)) > len(body) {
		return "", nil, errors.New("the topic's name does not fit into the record")
	}
	end := 2 + int(binary.BigEndian.Uint16(body))
	if !utf8.Valid(body[2:end]) {
		return "", nil, errors.New("the topic's name is not UTF-8")
	}
	return string(body[2:end]), body[end:], nil
}

// WithTopic puts a topic's name before a payload.
func WithTopic(topic string, payload []byte) []byte {
	out := binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(topic)+len(payload)), uint16(len(topic)))
	return append(append(out, topic...), payload...)
}

// An Envelope stands before the record of a mail. Damaged: its record is, and Record has nothing.
type Envelope struct {
	MsgID, Seq, UIN uint64
	Session         uint32
	Device          uint16
	Lane            byte
	Gap             bool // no record: what this device has not got of the lane up to Seq is gone
	Again           bool // sent before
	Damaged         bool
	Record          Record
}

// DecodeEnvelope takes the first envelope, with its record, of what a gateway delivers.
func DecodeEnvelope(data []byte) (e Envelope, rest []byte, err error) {
	if len(data) < envelopeSize {
		return e, nil, errors.New("an envelope has 32 bytes")
	}
	e.MsgID = binary.LittleEndian.Uint64(data)
	e.Seq = binary.LittleEndian.Uint64(data[8:])
	e.UIN = binary.LittleEndian.Uint64(data[16:])
	e.Session = binary.LittleEndian.Uint32(data[24:])
	e.Device = binary.LittleEndian.Uint16(data[28:])
	e.Lane, e.Gap, e.Again = data[30], data[31]&envelopeGap != 0, data[31]&envelopeAgain != 0
	if e.Gap {
		return e, data[envelopeSize:], nil
	}
	e.Record, rest, err = Decode(data[envelopeSize:])
	if err != nil && rest != nil {
		e.Damaged, err = true, nil
	}
	return e, rest, err
}

// EpochMs is 2020-01-01 in Unix milliseconds.
var EpochMs = time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC).UnixMilli()

// Snowflake makes an ID: 41 bits of milliseconds since 2020, 12 of the worker, 10 of the sequence.
func Snowflake(unixMs int64, worker, sequence uint32) uint64 {
	return uint64(unixMs-EpochMs)<<22 | uint64(worker)<<10 | uint64(sequence)
}

// SnowflakeMs is the time in an ID, Unix milliseconds.
func SnowflakeMs(id uint64) int64 { return int64(id>>22) + EpochMs }

// TopicRoom is the room that carries a free topic.
func TopicRoom(topic string) uint64 {
	first := topic
	for at := range topic {
		if topic[at] == '/' {
			first = topic[:at]
			break
		}
	}
	return 1<<62 | xxh3.HashString(first)>>2
}

// Slots of every durable topic.
const Slots = 65_536

// SlotOf is the slot of a key.
func SlotOf(key []byte) int { return int(xxh3.Hash(key) % Slots) }

// Hash is xxh3 with 64 bits.
func Hash(text string) uint64 { return xxh3.HashString(text) }

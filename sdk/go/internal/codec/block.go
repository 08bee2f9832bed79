package codec

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// Bits of a durable topic's message.
const (
	BitLoadTest  = 1
	BitTag       = 2
	BitDeliverAt = 4
	BitExpires   = 8
	BitKey       = 16
	BitHeaders   = 32
	BitEventTime = 64

	BlockHead     = 48
	IndexBytes    = 8
	StampBytes    = 32
	MaxBlockBytes = 1 << 20
	MaxKeyBytes   = 4096
	MaxTagBytes   = 100
	maxHeaders    = 64
	blockMagic    = 0x4250
	holeVersion   = 2
)

// A Header is a named value of a durable topic's message.
type Header struct {
	Name  string
	Value []byte
}

// A TopicMessage is a message as a block holds it. HasKey tells an empty key from none; times of 0 are not given.
type TopicMessage struct {
	Body        []byte
	Slot        int
	Key         []byte
	HasKey      bool
	Headers     []Header
	EventUs     int64
	DeliverAtUs int64
	ExpiresInS  uint32
	Tag         string
	LoadTest    bool
}

// EncodeTopicMessage lays out the fields and the body of a message; its length and flags go into the index.
func EncodeTopicMessage(m *TopicMessage) (data []byte, flags byte, err error) {
	le := binary.LittleEndian
	if m.LoadTest {
		flags |= BitLoadTest
	}
	if m.EventUs > 0 {
		flags |= BitEventTime
		data = le.AppendUint64(data, uint64(m.EventUs))
	}
	if m.DeliverAtUs > 0 {
		flags |= BitDeliverAt
		data = le.AppendUint64(data, uint64(m.DeliverAtUs))
	}
	if m.ExpiresInS > 0 {
		flags |= BitExpires
		data = le.AppendUint32(data, m.ExpiresInS)
	}
	if m.Tag != "" {
		if len(m.Tag) > MaxTagBytes {
			return nil, 0, fmt.Errorf("a tag has 1 to %d bytes, this one %d", MaxTagBytes, len(m.Tag))
		}
		flags |= BitTag
		data = append(append(data, byte(len(m.Tag))), m.Tag...)
	}
	if m.HasKey {
		if len(m.Key) > MaxKeyBytes {
			return nil, 0, fmt.Errorf("a key has at most %d bytes, this one %d", MaxKeyBytes, len(m.Key))
		}
		flags |= BitKey
		data = append(le.AppendUint16(data, uint16(len(m.Key))), m.Key...)
	}
	if len(m.Headers) > 0 {
		if len(m.Headers) > maxHeaders {
			return nil, 0, fmt.Errorf("a message has at most %d headers, this one %d", maxHeaders, len(m.Headers))
		}
		flags |= BitHeaders
		data = append(data, byte(len(m.Headers)))
		for _, each := range m.Headers {
			if len(each.Name) == 0 || len(each.Name) > 255 || len(each.Value) > 65_535 {
				return nil, 0, fmt.Errorf("the header %q: a name has 1 to 255 bytes, a value at most 65535", each.Name)
			}
			data = le.AppendUint16(append(data, byte(len(each.Name))), uint16(len(each.Value)))
			data = append(append(data, each.Name...), each.Value...)
		}
	}
	return append(data, m.Body...), flags, nil
}

// An Encoded message of a block.
type Encoded struct {
	Slot  int
	Flags byte
	Data  []byte
}

// JoinBlock makes a block of encoded messages. first: position of the first one in the writer's stream to this part.
func JoinBlock(messages []Encoded, topic, part uint32, writer, first, progress uint64) []byte {
	le := binary.LittleEndian
	size := BlockHead + IndexBytes*len(messages)
	var joined byte
	for _, each := range messages {
		size += len(each.Data)
		joined |= each.Flags
	}
	out := make([]byte, BlockHead, size)
	le.PutUint16(out, blockMagic)
	out[2], out[3] = 1, joined
	le.PutUint32(out[4:], uint32(size))
	le.PutUint32(out[12:], topic)
	le.PutUint32(out[16:], part)
	le.PutUint32(out[20:], uint32(len(messages)))
	le.PutUint64(out[24:], writer)
	le.PutUint64(out[32:], first)
	le.PutUint64(out[40:], progress)
	end := 0
	for _, each := range messages {
		end += len(each.Data)
		out = le.AppendUint16(le.AppendUint32(out, uint32(end)), uint16(each.Slot))
		out = append(out, each.Flags, 0)
	}
	for _, each := range messages {
		out = append(out, each.Data...)
	}
	le.PutUint32(out[8:], crc32.ChecksumIEEE(out[12:]))
	return out
}

// A Stored is a message at its place in a block.
type Stored struct {
	Number int // in the block
	Slot   int
	Flags  byte
	Data   []byte
}

// A StoredBlock is a block behind the stamp of its leader.
type StoredBlock struct {
	Base     uint64 // offset of the first message
	AtUs     int64
	Sender   uint64
	Writer   uint64
	Count    int
	Messages []Stored // none of a block whose messages compaction has removed
}

// DecodeStored takes the first stored block of an answer.
func DecodeStored(data []byte) (b StoredBlock, rest []byte, err error) {
	le := binary.LittleEndian
	if len(data) < StampBytes+BlockHead+IndexBytes {
		return b, nil, errors.New("a stored block is cut off")
	}
	size := int(le.Uint32(data))
	if size < BlockHead+IndexBytes || size > MaxBlockBytes || StampBytes+size > len(data) {
		return b, nil, errors.New("a stored block does not have the size that its stamp says")
	}
	block := data[StampBytes : StampBytes+size]
	rest = data[StampBytes+size:]
	if crc := crc32.ChecksumIEEE(data[8:StampBytes]); crc32.Update(crc, crc32.IEEETable, block[8:12]) != le.Uint32(data[4:]) {
		return b, nil, errors.New("the CRC of a stored block's stamp is wrong")
	}
	if le.Uint16(block) != blockMagic || int(le.Uint32(block[4:])) != size || crc32.ChecksumIEEE(block[12:]) != le.Uint32(block[8:]) {
		return b, nil, errors.New("a block was damaged on the way")
	}
	b.Base, b.AtUs, b.Sender = le.Uint64(data[8:]), int64(le.Uint64(data[16:])), le.Uint64(data[24:])
	b.Count, b.Writer = int(le.Uint32(block[20:])), le.Uint64(block[24:])
	if block[2] == holeVersion {
		return b, rest, nil
	}
	index := BlockHead + IndexBytes*b.Count
	if b.Count < 1 || index > size {
		return b, nil, errors.New("a block's index does not fit its messages")
	}
	b.Messages, err = Spans(block[BlockHead:index], block[index:])
	return b, rest, err
}

// Spans finds the messages that an index describes.
func Spans(index, data []byte) ([]Stored, error) {
	le := binary.LittleEndian
	if len(index)%IndexBytes != 0 {
		return nil, errors.New("the index of messages is not whole")
	}
	found, at := make([]Stored, 0, len(index)/IndexBytes), 0
	for number := 0; len(index) > 0; number, index = number+1, index[IndexBytes:] {
		end := int(le.Uint32(index))
		if end < at || end > len(data) {
			return nil, errors.New("the index does not fit its messages")
		}
		found = append(found, Stored{number, int(le.Uint16(index[4:])), index[6], data[at:end:end]})
		at = end
	}
	return found, nil
}

// DecodeTopicMessage reads the fields of a message.
func DecodeTopicMessage(s Stored) (m TopicMessage, err error) {
	le, data := binary.LittleEndian, s.Data
	m.Slot, m.LoadTest = s.Slot, s.Flags&BitLoadTest != 0
	take := func(size int) []byte {
		if err != nil || size > len(data) {
			err = errors.New("a message's fields do not fit in it")
			return make([]byte, max(size, 0))
		}
		taken := data[:size:size]
		data = data[size:]
		return taken
	}
	if s.Flags&BitEventTime != 0 {
		m.EventUs = int64(le.Uint64(take(8)))
	}
	if s.Flags&BitDeliverAt != 0 {
		m.DeliverAtUs = int64(le.Uint64(take(8)))
	}
	if s.Flags&BitExpires != 0 {
		m.ExpiresInS = le.Uint32(take(4))
	}
	if s.Flags&BitTag != 0 {
		m.Tag = string(take(int(take(1)[0])))
	}
	if s.Flags&BitKey != 0 {
		m.HasKey, m.Key = true, take(int(le.Uint16(take(2))))
	}
	if s.Flags&BitHeaders != 0 {
		for left := int(take(1)[0]); left > 0 && err == nil; left-- {
			sizes := take(3)
			name := string(take(int(sizes[0])))
			m.Headers = append(m.Headers, Header{name, take(int(le.Uint16(sizes[1:])))})
		}
	}
	m.Body = data
	return m, err
}

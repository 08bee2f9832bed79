package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"time"
)

// Kinds and flags of records, docs/protocol.md, "Record".
const (
	kindRoom   = 1
	kindMail   = 4
	flagTraced = 1
	flagToRoom = 4
	typeNormal = 64 // the normal lane, type 0

	headerSize   = 40
	stampSize    = 24
	envelopeSize = 32
	envelopeGap  = 1
)

// A Record is one message. The body of a topic's message begins with the topic (flag 16).
type Record struct {
	Kind, Flags, Type byte
	LifetimeMin       uint16
	Snowflake         uint64
	Key, Sender       uint64 // Key: RoomID or UIN
	Extension, Body   []byte
	Stamps            []byte // of flag 1, with the count byte; nil without
}

// Encode lays a record out.
func (r Record) Encode() []byte {
	size := headerSize + len(r.Extension) + len(r.Body) + len(r.Stamps)
	out := make([]byte, headerSize, size)
	binary.LittleEndian.PutUint32(out[0:], uint32(size-4))
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

// Decode takes the first record of a batch; rest is what follows it.
func Decode(data []byte) (r Record, rest []byte, err error) {
	if len(data) < headerSize {
		return r, nil, errors.New("a record has at least 40 bytes")
	}
	size := int(binary.LittleEndian.Uint32(data)) + 4
	extension := int(binary.LittleEndian.Uint16(data[8:]))
	if size < headerSize+extension || size > len(data) {
		return r, nil, fmt.Errorf("a record of %d bytes in %d", size, len(data))
	}
	end := size
	if data[5]&flagTraced != 0 {
		if end == headerSize+extension {
			return r, nil, errors.New("a traced record without its count byte")
		}
		end -= 1 + stampSize*int(data[size-1])
		if end < headerSize+extension {
			return r, nil, errors.New("more stamps than the record holds")
		}
		r.Stamps = data[end:size]
	}
	if crc32.ChecksumIEEE(data[headerSize:end]) != binary.LittleEndian.Uint32(data[12:]) {
		return r, nil, errors.New("the CRC is wrong")
	}
	r.Kind, r.Flags, r.Type = data[4], data[5], data[6]
	r.LifetimeMin = binary.LittleEndian.Uint16(data[10:])
	r.Snowflake = binary.LittleEndian.Uint64(data[16:])
	r.Key = binary.LittleEndian.Uint64(data[24:])
	r.Sender = binary.LittleEndian.Uint64(data[32:])
	r.Extension = data[headerSize : headerSize+extension]
	r.Body = data[headerSize+extension : end]
	return r, data[size:], nil
}

// An Envelope stands before the record of a mail.
type Envelope struct {
	MsgID, Seq, UIN uint64
	Lane            byte
	Gap             bool // no record: what this device has not got of the lane up to Seq is gone
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
	e.Lane, e.Gap = data[30], data[31]&envelopeGap != 0
	if e.Gap {
		return e, data[envelopeSize:], nil
	}
	e.Record, rest, err = Decode(data[envelopeSize:])
	return e, rest, err
}

var epoch = time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC).UnixMilli()

// Snowflake makes an ID: 41 bits of milliseconds since 2020, 12 of the worker, 10 of the sequence.
func Snowflake(unixMs int64, worker, sequence uint32) uint64 {
	return uint64(unixMs-epoch)<<22 | uint64(worker)<<10 | uint64(sequence)
}

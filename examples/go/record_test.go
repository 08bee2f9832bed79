package main

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
		Stamps                  [][]string
	}
	Snowflakes []struct {
		TimeMs           string `json:"time_ms"`
		Worker, Sequence uint32
		ID               string
	} `json:"snowflake_ids"`
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
		place = "../../proto/vectors.json"
	}
	text, err := os.ReadFile(place)
	if err == nil {
		err = json.Unmarshal(text, &found)
	}
	if err != nil || len(found.Records) == 0 || len(found.Snowflakes) == 0 || len(found.Envelopes) == 0 {
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
		wanted[len(wanted)-1] ^= 1
		if _, _, err := Decode(wanted); err == nil && len(vector.Body) > 0 && len(vector.Stamps) == 0 {
			t.Error(vector.Name, ": damage was not found")
		}
	}
}

func TestSnowflakes(t *testing.T) {
	for _, vector := range load(t).Snowflakes {
		if made := Snowflake(int64(number(vector.TimeMs)), vector.Worker, vector.Sequence); made != number(vector.ID) {
			t.Errorf("%d, not %s", made, vector.ID)
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

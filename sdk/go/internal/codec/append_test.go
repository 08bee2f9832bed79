package codec

import "testing"

// Programs append to what they got. That must not change the messages behind it, nor a message's other fields.
func TestAppendingToAMessageLeavesTheOthersAlone(t *testing.T) {
	one, two := Record{Key: 1, Extension: []byte("{}"), Body: []byte("one")}, Record{Key: 1, Body: []byte("two")}
	batch := append(one.Encode(), two.Encode()...)
	first, rest, err := Decode(batch)
	if err != nil {
		t.Fatal(err)
	}
	_ = append(first.Body, "and more"...)
	_ = append(first.Extension, "and more"...)
	second, _, err := Decode(rest)
	if err != nil || string(first.Body) != "one" || string(second.Body) != "two" {
		t.Fatalf("%q, %q, %v", first.Body, second.Body, err)
	}
	data, flags, err := EncodeTopicMessage(&TopicMessage{Body: []byte("body"), HasKey: true, Key: []byte("key")})
	if err != nil {
		t.Fatal(err)
	}
	found, err := DecodeTopicMessage(Stored{Flags: flags, Data: data})
	if err != nil {
		t.Fatal(err)
	}
	if _ = append(found.Key, "and more"...); string(found.Body) != "body" {
		t.Fatalf("the body is %q", found.Body)
	}
}

package pixiu

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"pixiu/internal/codec"
	wire "pixiu/wire/v1"
)

// Topics are the cluster's durable topics. Changes are in effect when a call returns.
type Topics struct{ client *Client }

// Topics creates, changes and looks at durable topics.
func (c *Client) Topics() *Topics { return &Topics{c} }

// TopicSettings of a durable topic; zero values set no limit.
type TopicSettings struct {
	Retention             time.Duration // age after which messages may be dropped
	RetentionBytes        uint64        // of a part, above which its oldest messages may be dropped
	MessagesPerSecond     uint64        // that it takes, all writers together
	BytesPerSecond        uint64
	ReadMessagesPerSecond uint64 // that it gives, to all members and readers together
	ReadBytesPerSecond    uint64
	RetainAcknowledged    bool          // what all channels have acknowledged may be dropped
	Compact               time.Duration // keep the last message of each key, and deleted keys for this time
	Store                 string        // an absolute folder or a URL for closed segments
}

func (s *TopicSettings) wire() *wire.TopicSettings {
	return &wire.TopicSettings{
		RetentionS: uint64(s.Retention / time.Second), RetentionBytes: s.RetentionBytes, MessagesPerS: s.MessagesPerSecond,
		BytesPerS: s.BytesPerSecond, ReadMessagesPerS: s.ReadMessagesPerSecond, ReadBytesPerS: s.ReadBytesPerSecond,
		RetainAcknowledged: s.RetainAcknowledged, Compact: uint64(s.Compact / time.Second), Store: s.Store,
	}
}

// TopicInfo describes a durable topic.
type TopicInfo struct {
	Name      string
	ID        uint32
	Version   uint64
	Settings  TopicSettings
	Parts     []Part // by number
	Channels  []ChannelInfo
	DeletedAt time.Time // zero: it is not deleted
}

// OpenParts are those that take writes.
func (t *TopicInfo) OpenParts() []Part {
	return slices.DeleteFunc(slices.Clone(t.Parts), func(part Part) bool { return part.Sealed })
}

// ChannelInfo describes a channel.
type ChannelInfo struct {
	Name        string
	Ordered     bool          // the messages of a key, or slot, come one batch after the other
	FromEnd     bool          // it began with what was stored from then on
	MaxAttempts int           // deliveries before a message goes to the dead letters; 0: the cluster's default
	Timeout     time.Duration // for which a member may keep a message; 0: the cluster's default
	Filter      string        // an expression; empty: none
}

func infoOf(found *wire.TopicDescription) *TopicInfo {
	s := found.GetSettings()
	info := &TopicInfo{Name: found.Name, ID: found.Topic, Version: found.Version, Settings: TopicSettings{
		Retention: time.Duration(s.GetRetentionS()) * time.Second, RetentionBytes: s.GetRetentionBytes(), MessagesPerSecond: s.GetMessagesPerS(),
		BytesPerSecond: s.GetBytesPerS(), ReadMessagesPerSecond: s.GetReadMessagesPerS(), ReadBytesPerSecond: s.GetReadBytesPerS(),
		RetainAcknowledged: s.GetRetainAcknowledged(), Compact: time.Duration(s.GetCompact()) * time.Second, Store: s.GetStore(),
	}}
	if found.DeletedAtMs > 0 {
		info.DeletedAt = time.UnixMilli(int64(found.DeletedAtMs))
	}
	for _, each := range found.Parts {
		if each.State != wire.PartState_PART_OPENING {
			info.Parts = append(info.Parts, partOf(each))
		}
	}
	slices.SortFunc(info.Parts, func(a, b Part) int { return cmp.Compare(a.Number, b.Number) })
	for _, each := range found.Channels {
		info.Channels = append(info.Channels, ChannelInfo{
			each.Name, each.Ordered, each.FromEnd, int(each.MaxAttempts), time.Duration(each.TimeoutMs) * time.Millisecond, each.Filter,
		})
	}
	return info
}

func (t *Topics) change(ctx context.Context, change *wire.TopicChange) (*TopicInfo, error) {
	if err := checkName(change.Name, "topic"); err != nil {
		return nil, err
	}
	named := change.Name
	if change.GetCreate() != nil {
		named = ""
	}
	found, err := t.client.topicMaps.ask(ctx, named, changeFor, true, func(ctx context.Context, stub wire.TopicsClient) (*wire.TopicDescription, error) {
		return stub.Change(ctx, change)
	})
	if err != nil {
		return nil, err
	}
	t.client.topicMaps.learn(mapOf(found))
	return infoOf(found), nil
}

// Create creates a topic. parts: parallel logs at the beginning; 0: one for each group of replicas. It fails with ErrTopicExists.
func (t *Topics) Create(ctx context.Context, name string, parts int, settings TopicSettings) (*TopicInfo, error) {
	create := &wire.CreateTopic{Parts: uint32(max(parts, 0)), Settings: settings.wire()}
	return t.change(ctx, &wire.TopicChange{Name: name, Change: &wire.TopicChange_Create{Create: create}})
}

// Ensure returns a topic as it is, and creates it if it is missing.
func (t *Topics) Ensure(ctx context.Context, name string, parts int, settings TopicSettings) (*TopicInfo, error) {
	create := &wire.CreateTopic{Parts: uint32(max(parts, 0)), Settings: settings.wire(), IfMissing: true}
	return t.change(ctx, &wire.TopicChange{Name: name, Change: &wire.TopicChange_Create{Create: create}})
}

// Describe describes a topic.
func (t *Topics) Describe(ctx context.Context, name string) (*TopicInfo, error) {
	if err := checkName(name, "topic"); err != nil {
		return nil, err
	}
	_, found, err := t.client.topicMaps.describe(ctx, name, 0)
	if err != nil {
		return nil, err
	}
	return infoOf(found), nil
}

// List lists the topics whose names begin with a prefix, by name.
func (t *Topics) List(ctx context.Context, prefix string) ([]*TopicInfo, error) {
	var found []*TopicInfo
	for after := ""; ; {
		var page *wire.ListTopicsReply
		_, err := t.client.topicMaps.ask(ctx, "", askFor, false, func(ctx context.Context, stub wire.TopicsClient) (_ *wire.TopicDescription, err error) {
			page, err = stub.List(ctx, &wire.ListTopicsRequest{Prefix: prefix, After: after})
			return nil, err
		})
		if err != nil {
			return nil, err
		}
		for _, each := range page.Topics {
			found = append(found, infoOf(each))
			after = each.Name
		}
		if !page.More || len(page.Topics) == 0 {
			return found, nil
		}
	}
}

// Alter sets all settings of a topic.
func (t *Topics) Alter(ctx context.Context, name string, settings TopicSettings) (*TopicInfo, error) {
	return t.change(ctx, &wire.TopicChange{Name: name, Change: &wire.TopicChange_Alter{Alter: settings.wire()}})
}

// Delete deletes a topic; it can be restored for a day. force: although channels have members.
func (t *Topics) Delete(ctx context.Context, name string, force bool) error {
	_, err := t.change(ctx, &wire.TopicChange{Name: name, Change: &wire.TopicChange_Delete{Delete: &wire.DeleteTopic{Force: force}}})
	return err
}

// Restore brings a deleted topic back.
func (t *Topics) Restore(ctx context.Context, name string) (*TopicInfo, error) {
	return t.change(ctx, &wire.TopicChange{Name: name, Change: &wire.TopicChange_Restore{Restore: &wire.RestoreTopic{}}})
}

// Resize seals parts, and opens others for their slots: a split, a merge or a move. bounds: first slots of the new parts after the
// first one; groups: of the new parts, none: chosen by load. The order of each key holds.
func (t *Topics) Resize(ctx context.Context, name string, parts, bounds, groups []uint32) (*TopicInfo, error) {
	resize := &wire.ResizeTopic{Parts: parts, Bounds: bounds, Groups: groups}
	return t.change(ctx, &wire.TopicChange{Name: name, Change: &wire.TopicChange_Resize{Resize: resize}})
}

// SetChannel creates a channel, or changes the attempts, time-out and filter of one that is there.
func (t *Topics) SetChannel(ctx context.Context, name string, channel ChannelInfo) (*TopicInfo, error) {
	if err := checkName(channel.Name, "channel"); err != nil {
		return nil, err
	}
	wanted := &wire.TopicChannel{
		Name: channel.Name, Ordered: channel.Ordered, FromEnd: channel.FromEnd, MaxAttempts: uint32(max(channel.MaxAttempts, 0)),
		TimeoutMs: uint32((channel.Timeout + time.Millisecond - 1) / time.Millisecond), Filter: channel.Filter,
	}
	return t.change(ctx, &wire.TopicChange{Name: name, Change: &wire.TopicChange_SetChannel{SetChannel: wanted}})
}

// RemoveChannel removes a channel with everything that it knows.
func (t *Topics) RemoveChannel(ctx context.Context, name, channel string) error {
	_, err := t.change(ctx, &wire.TopicChange{Name: name, Change: &wire.TopicChange_RemoveChannel{RemoveChannel: channel}})
	return err
}

// ChannelPart is the state of a channel in one part.
type ChannelPart struct {
	Channel        string
	Part           uint32
	Floor, End     uint64 // everything below Floor is acknowledged
	Unacknowledged uint64
	WithMembers    uint64
	Waiting        uint64 // for another delivery
	Dead, Lost     uint64
	Members        int
	Stuck          []string // why messages wait, in words
}

// A DeadLetter is a message of a channel that was rejected, or whose attempts are used up.
type DeadLetter struct {
	Part     uint32
	Offset   uint64
	Attempts int
	Reason   string
	At       time.Time
	Message  *TopicMessage // nil: it can no longer be read
}

// ask asks the leaders of all groups, or of those that hold the request's parts.
func (t *Topics) ask(ctx context.Context, name string, request *wire.ChannelRequest) ([]*wire.ChannelReply, error) {
	if err := checkName(name, "topic"); err != nil {
		return nil, err
	}
	m, _, err := t.client.topicMaps.describe(ctx, name, 0)
	if err != nil {
		return nil, err
	}
	groups := map[uint32]bool{}
	for number, part := range m.parts {
		if len(request.Parts) == 0 || slices.Contains(request.Parts, number) {
			groups[part.Group] = true
		}
	}
	var found []*wire.ChannelReply
	for _, group := range slices.Sorted(maps.Keys(groups)) {
		reply, err := askLeader(ctx, t.client, name, group, askFor, leaderFor,
			func(ctx context.Context, stub wire.TopicLogClient, trailer *metadata.MD) (*wire.ChannelReply, *wire.TopicRefusal, error) {
				reply, err := stub.Channel(ctx, request, grpc.Trailer(trailer))
				return reply, reply.GetRefusal(), err
			})
		if err != nil {
			return nil, err
		}
		found = append(found, reply)
	}
	return found, nil
}

// ChannelState is the state of a channel, or of all (""), in each part.
func (t *Topics) ChannelState(ctx context.Context, name, channel string) ([]ChannelPart, error) {
	replies, err := t.ask(ctx, name, &wire.ChannelRequest{Topic: name, Channel: channel, Ask: &wire.ChannelRequest_State{State: true}})
	var found []ChannelPart
	for _, reply := range replies {
		for _, each := range reply.Parts {
			found = append(found, ChannelPart{
				each.Channel, each.Part, each.Floor, each.End, each.Unacknowledged, each.WithMembers, each.Waiting, each.Dead, each.Lost,
				len(each.Members), each.Stuck,
			})
		}
	}
	return found, err
}

// DeadLetters are those of a channel, at most limit of each group of replicas; 0: 100.
func (t *Topics) DeadLetters(ctx context.Context, name, channel string, limit int) ([]DeadLetter, error) {
	dead := &wire.DeadLettersRequest{Limit: uint32(max(limit, 0))}
	replies, err := t.ask(ctx, name, &wire.ChannelRequest{Topic: name, Channel: channel, Ask: &wire.ChannelRequest_Dead{Dead: dead}})
	var found []DeadLetter
	for _, reply := range replies {
		for _, each := range reply.Dead {
			letter := DeadLetter{
				Part: each.Part, Offset: each.Message.GetBase(), Attempts: int(each.Attempts), Reason: each.Reason, At: time.UnixMicro(int64(each.AtUs)),
			}
			spans, wrong := codec.Spans(each.Message.GetIndex(), each.Message.GetData())
			if wrong == nil && len(spans) > 0 {
				sent := each.Message
				if letter.Message, err = topicMessage(name, each.Part, sent.Base, int64(sent.TimeUs), sent.Sender, spans[0]); err != nil {
					return nil, err
				}
			}
			found = append(found, letter)
		}
	}
	return found, err
}

// Resend delivers all dead letters of a channel again, with new attempts. It returns their number.
func (t *Topics) Resend(ctx context.Context, name, channel string) (int, error) {
	return t.changed(t.ask(ctx, name, &wire.ChannelRequest{Topic: name, Channel: channel, Ask: &wire.ChannelRequest_Resend{Resend: &wire.ResendDead{}}}))
}

func (t *Topics) changed(replies []*wire.ChannelReply, err error) (int, error) {
	total := 0
	for _, reply := range replies {
		total += int(reply.Changed)
	}
	return total, err
}

// Seek moves a channel to where a start says: Earliest, Latest or FromTime. force: although it has members. It returns the number
// of messages that are to be delivered again or are skipped.
func (t *Topics) Seek(ctx context.Context, name, channel string, to Start, force bool) (int, error) {
	seek := &wire.SeekChannel{Force: force}
	switch {
	case to.end:
		seek.To = &wire.SeekChannel_End{End: true}
	case to.atUs > 0:
		seek.To = &wire.SeekChannel_TimeUs{TimeUs: uint64(to.atUs)}
	case to.position != nil:
		return 0, fail(ErrInvalidArgument, "a channel is moved to Earliest, Latest or FromTime")
	default:
		seek.To = &wire.SeekChannel_Start{Start: true}
	}
	changed, err := t.changed(t.ask(ctx, name, &wire.ChannelRequest{Topic: name, Channel: channel, Ask: &wire.ChannelRequest_Seek{Seek: seek}}))
	if err != nil {
		return changed, err
	}
	_, err = t.ask(ctx, name, &wire.ChannelRequest{Topic: name, Channel: channel, Ask: &wire.ChannelRequest_Rejoin{Rejoin: true}})
	return changed, err
}

// A Topic is a durable topic: a log that is stored and replicated.
type Topic struct {
	client *Client
	Name   string
}

// Topic is a durable topic. Topics().Create creates it.
func (c *Client) Topic(name string) *Topic { return &Topic{c, name} }

// Last is the last message of a key, in a topic that is compacted; nil: there is none, or the key was deleted by a message without
// a body.
func (t *Topic) Last(ctx context.Context, key []byte) (*TopicMessage, error) {
	if err := checkName(t.Name, "topic"); err != nil {
		return nil, err
	}
	slot := codec.SlotOf(key)
	m, err := t.client.topicMaps.topic(ctx, t.Name)
	for range 10 {
		if err != nil {
			return nil, err
		}
		part, known := m.openPart(slot)
		again := false
		for known && !again {
			request := &wire.TopicLastRequest{Topic: t.Name, Part: part.Number, Key: key}
			reply, err := askLeader(ctx, t.client, t.Name, part.Group, askFor, leaderFor,
				func(ctx context.Context, stub wire.TopicLogClient, trailer *metadata.MD) (*wire.TopicLastReply, *wire.TopicRefusal, error) {
					reply, err := stub.Last(ctx, request, grpc.Trailer(trailer))
					return reply, nil, err
				})
			if err != nil {
				if errorOf(err).Code != "WRONG_PARTITION" {
					return nil, err
				}
				again = true
				break
			}
			if reply.Sealed && !part.Sealed {
				again = true // its children may have a newer one
				break
			}
			if reply.Known {
				spans, err := codec.Spans(reply.Message.GetIndex(), reply.Message.GetData())
				if err != nil || len(spans) == 0 {
					return nil, nil
				}
				return topicMessage(t.Name, part.Number, reply.Message.Base, int64(reply.Message.TimeUs), reply.Message.Sender, spans[0])
			}
			parents := part.Parents
			known = false
			for _, number := range parents {
				if parent, kept := m.parts[number]; kept && parent.Low <= slot && slot < parent.High {
					part, known = parent, true
				}
			}
		}
		if !again {
			return nil, nil
		}
		m, _, err = t.client.topicMaps.describe(ctx, t.Name, m.version)
	}
	return nil, fail(ErrUnavailable, "the parts of topic %s change all the time; try again", t.Name)
}

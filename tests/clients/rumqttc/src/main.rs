//! Driver of rumqttc. Arguments and output: tests/clients/script.py.
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rumqttc::{v5, Transport};
use tokio::sync::mpsc::{unbounded_channel, UnboundedReceiver, UnboundedSender};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

const WAIT: Duration = Duration::from_secs(10);
const QUIET: Duration = Duration::from_millis(500);
static NUMBER: AtomicU32 = AtomicU32::new(0);
type Result<T> = std::result::Result<T, String>;

#[derive(Clone, Debug, PartialEq)]
struct Message {
    topic: String,
    payload: String,
    qos: u8,
    retain: bool,
}

#[derive(Clone)]
struct Place {
    host: String,
    port: u16,
    transport: String,
    five: bool,
    ca: Vec<u8>,
    prefix: String,
}

enum Either {
    Four(rumqttc::AsyncClient),
    Five(v5::AsyncClient),
}

/// A client, the task that runs it, what came, and the acknowledgements that it got.
struct Client {
    client: Either,
    task: JoinHandle<()>,
    messages: UnboundedReceiver<Message>,
    acknowledged: UnboundedReceiver<Result<()>>,
}

fn name(place: &Place) -> String {
    format!("{}-{}", place.prefix.replace('/', "-"), NUMBER.fetch_add(1, Ordering::SeqCst))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn qos4(qos: u8) -> rumqttc::QoS {
    rumqttc::qos(qos).unwrap()
}

fn qos5(qos: u8) -> v5::mqttbytes::QoS {
    v5::mqttbytes::qos(qos).unwrap()
}

impl Client {
    async fn open(place: &Place, will: Option<&Message>) -> Result<Client> {
        Client::open_as(place, name(place), will, false).await
    }

    async fn open_as(place: &Place, id: String, will: Option<&Message>, keep: bool) -> Result<Client> {
        let address = if place.transport == "ws" { format!("ws://{}:{}/mqtt", place.host, place.port) } else { place.host.clone() };
        let transport = match place.transport.as_str() {
            "tls" => Transport::tls(place.ca.clone(), None, None),
            "ws" => Transport::Ws,
            _ => Transport::Tcp,
        };
        let (inbox, messages) = unbounded_channel();
        let (acks, acknowledged) = unbounded_channel();
        let (client, task) = if place.five { five(id, address, place.port, transport, will, keep, inbox, acks) } else { four(id, address, place.port, transport, will, keep, inbox, acks) };
        let mut found = Client { client, task, messages, acknowledged };
        found.ack().await?;
        Ok(found)
    }

    async fn ack(&mut self) -> Result<()> {
        timeout(WAIT, self.acknowledged.recv()).await.map_err(|_| "no answer")?.ok_or("it ended")?
    }

    async fn subscribe(&mut self, topic: &str, qos: u8) -> Result<()> {
        match &self.client {
            Either::Four(client) => client.subscribe(topic, qos4(qos)).await.map_err(|e| e.to_string())?,
            Either::Five(client) => client.subscribe(topic, qos5(qos)).await.map_err(|e| e.to_string())?,
        }
        self.ack().await
    }

    async fn publish(&mut self, topic: &str, payload: &str, qos: u8, retain: bool) -> Result<()> {
        match &self.client {
            Either::Four(client) => client.publish(topic, qos4(qos), retain, payload).await.map_err(|e| e.to_string())?,
            Either::Five(client) => client.publish(topic, qos5(qos), retain, payload.to_owned()).await.map_err(|e| e.to_string())?,
        }
        if qos > 0 { self.ack().await } else { Ok(()) }
    }

    async fn next(&mut self) -> Result<Message> {
        timeout(WAIT, self.messages.recv()).await.map_err(|_| "no message")?.ok_or("it ended".into())
    }

    async fn nothing(&mut self) -> Result<()> {
        match timeout(QUIET, self.messages.recv()).await {
            Ok(Some(message)) => Err(format!("one message too many: {message:?}")),
            _ => Ok(()),
        }
    }

    fn cut(self) {
        self.task.abort();
    }

    async fn close(self) -> Result<()> {
        match &self.client {
            Either::Four(client) => client.disconnect().await.map_err(|e| e.to_string())?,
            Either::Five(client) => client.disconnect().await.map_err(|e| e.to_string())?,
        }
        timeout(WAIT, self.task).await.map_err(|_| "no end")?.map_err(|e| e.to_string())
    }
}

fn four(id: String, address: String, port: u16, transport: Transport, will: Option<&Message>, keep: bool, inbox: UnboundedSender<Message>, acks: UnboundedSender<Result<()>>) -> (Either, JoinHandle<()>) {
    use rumqttc::{ConnectReturnCode, Event, Outgoing, Packet, SubscribeReasonCode};
    let mut options = rumqttc::MqttOptions::new(id, address, port);
    options.set_clean_session(!keep);
    options.set_transport(transport);
    if let Some(will) = will {
        options.set_last_will(rumqttc::LastWill::new(&will.topic, will.payload.clone(), qos4(will.qos), will.retain));
    }
    let (client, mut events) = rumqttc::AsyncClient::new(options, 100);
    let task = tokio::spawn(async move {
        loop {
            let said = match events.poll().await {
                Ok(Event::Incoming(Packet::ConnAck(ack))) if ack.code == ConnectReturnCode::Success => Ok(()),
                Ok(Event::Incoming(Packet::ConnAck(ack))) => Err(format!("{:?}", ack.code)),
                Ok(Event::Incoming(Packet::SubAck(ack))) if ack.return_codes.contains(&SubscribeReasonCode::Failure) => Err("SUBACK".into()),
                Ok(Event::Incoming(Packet::SubAck(_) | Packet::PubAck(_) | Packet::PubComp(_))) => Ok(()),
                Ok(Event::Incoming(Packet::Publish(p))) => {
                    let _ = inbox.send(Message { topic: p.topic, payload: text(&p.payload), qos: p.qos as u8, retain: p.retain });
                    continue;
                }
                Ok(Event::Outgoing(Outgoing::Disconnect)) => return,
                Ok(_) => continue,
                Err(error) => {
                    let _ = acks.send(Err(error.to_string()));
                    return;
                }
            };
            let _ = acks.send(said);
        }
    });
    (Either::Four(client), task)
}

fn five(id: String, address: String, port: u16, transport: Transport, will: Option<&Message>, keep: bool, inbox: UnboundedSender<Message>, acks: UnboundedSender<Result<()>>) -> (Either, JoinHandle<()>) {
    use rumqttc::Outgoing;
    use v5::mqttbytes::v5::{ConnectReturnCode, Packet, PubAckReason, SubscribeReasonCode};
    use v5::Event;
    let mut options = v5::MqttOptions::new(id, address, port);
    options.set_transport(transport);
    options.set_clean_start(!keep);
    if keep {
        let mut properties = v5::mqttbytes::v5::ConnectProperties::new();
        properties.session_expiry_interval = Some(3600);
        options.set_connect_properties(properties);
    }
    if let Some(will) = will {
        options.set_last_will(v5::mqttbytes::v5::LastWill::new(&will.topic, will.payload.clone(), qos5(will.qos), will.retain, None));
    }
    let (client, mut events) = v5::AsyncClient::new(options, 100);
    let task = tokio::spawn(async move {
        loop {
            let said = match events.poll().await {
                Ok(Event::Incoming(Packet::ConnAck(ack))) if ack.code == ConnectReturnCode::Success => Ok(()),
                Ok(Event::Incoming(Packet::ConnAck(ack))) => Err(format!("{:?}", ack.code)),
                Ok(Event::Incoming(Packet::SubAck(ack))) if !matches!(ack.return_codes[0], SubscribeReasonCode::Success(_)) => Err(format!("{:?}", ack.return_codes)),
                Ok(Event::Incoming(Packet::PubAck(ack))) if !matches!(ack.reason, PubAckReason::Success | PubAckReason::NoMatchingSubscribers) => Err(format!("{:?}", ack.reason)),
                Ok(Event::Incoming(Packet::SubAck(_) | Packet::PubAck(_) | Packet::PubComp(_))) => Ok(()),
                Ok(Event::Incoming(Packet::Publish(p))) => {
                    let _ = inbox.send(Message { topic: text(&p.topic), payload: text(&p.payload), qos: p.qos as u8, retain: p.retain });
                    continue;
                }
                Ok(Event::Outgoing(Outgoing::Disconnect)) => return,
                Ok(_) => continue,
                Err(error) => {
                    let _ = acks.send(Err(error.to_string()));
                    return;
                }
            };
            let _ = acks.send(said);
        }
    });
    (Either::Five(client), task)
}

fn expect<T: std::fmt::Debug + PartialEq>(got: T, wanted: T) -> Result<()> {
    if got == wanted { Ok(()) } else { Err(format!("{got:?}, not {wanted:?}")) }
}

async fn connect(place: Place) -> Result<()> {
    Client::open(&place, None).await?.close().await
}

async fn level(place: Place, qos: u8) -> Result<()> {
    let topic = format!("{}/qos{qos}", place.prefix);
    let (mut receiver, mut sender) = (Client::open(&place, None).await?, Client::open(&place, None).await?);
    receiver.subscribe(&topic, qos).await?;
    for number in 0..5 {
        sender.publish(&topic, &number.to_string(), qos, false).await?;
    }
    for number in 0..5 {
        expect(receiver.next().await?, Message { topic: topic.clone(), payload: number.to_string(), qos, retain: false })?;
    }
    receiver.nothing().await?;
    receiver.close().await?;
    sender.close().await
}

async fn wildcard(place: Place) -> Result<()> {
    let base = format!("{}/w", place.prefix);
    let (mut one, mut all, mut sender) = (Client::open(&place, None).await?, Client::open(&place, None).await?, Client::open(&place, None).await?);
    one.subscribe(&format!("{base}/+/c"), 0).await?;
    all.subscribe(&format!("{base}/#"), 0).await?;
    sender.publish(&format!("{base}/b/c"), "both", 1, false).await?;
    sender.publish(&format!("{base}/b/d"), "one", 1, false).await?;
    expect(one.next().await?.topic, format!("{base}/b/c"))?;
    expect((all.next().await?.payload, all.next().await?.payload), ("both".into(), "one".into()))?;
    one.nothing().await?;
    one.close().await?;
    all.close().await?;
    sender.close().await
}

async fn retained(place: Place) -> Result<()> {
    let topic = format!("{}/retained", place.prefix);
    let (mut sender, mut first, mut second) = (Client::open(&place, None).await?, Client::open(&place, None).await?, Client::open(&place, None).await?);
    sender.publish(&topic, "kept", 1, true).await?;
    first.subscribe(&topic, 1).await?;
    expect(first.next().await?, Message { topic: topic.clone(), payload: "kept".into(), qos: 1, retain: true })?;
    sender.publish(&topic, "", 1, true).await?;
    expect(first.next().await?.retain, false)?;
    second.subscribe(&topic, 1).await?;
    second.nothing().await?;
    sender.close().await?;
    first.close().await?;
    second.close().await
}

async fn will(place: Place) -> Result<()> {
    let topic = format!("{}/will", place.prefix);
    let message = |payload: &str| Message { topic: topic.clone(), payload: payload.into(), qos: 1, retain: false };
    let mut watcher = Client::open(&place, None).await?;
    watcher.subscribe(&topic, 1).await?;
    Client::open(&place, Some(&message("left"))).await?.close().await?;
    Client::open(&place, Some(&message("cut"))).await?.cut();
    expect(watcher.next().await?.payload, "cut".into())?;
    watcher.nothing().await?;
    watcher.close().await
}

async fn shared(place: Place) -> Result<()> {
    let topic = format!("{}/shared", place.prefix);
    let (mut one, mut other, mut sender) = (Client::open(&place, None).await?, Client::open(&place, None).await?, Client::open(&place, None).await?);
    one.subscribe(&format!("$share/g/{topic}"), 1).await?;
    other.subscribe(&format!("$share/g/{topic}"), 1).await?;
    let wanted: Vec<String> = (0..10).map(|number| number.to_string()).collect();
    for payload in &wanted {
        sender.publish(&topic, payload, 1, false).await?;
    }
    let mut got = Vec::new();
    while got.len() < 10 {
        tokio::select! {
            Some(message) = one.messages.recv() => got.push(message.payload),
            Some(message) = other.messages.recv() => got.push(message.payload),
            _ = sleep(WAIT) => return Err(format!("only {got:?}")),
        }
    }
    got.sort();
    expect(got, wanted)?;
    one.nothing().await?;
    other.nothing().await?;
    one.close().await?;
    other.close().await?;
    sender.close().await
}

async fn resume(place: Place) -> Result<()> {
    let (base, id) = (format!("{}/resume", place.prefix), name(&place));
    let (mut first, mut sender) = (Client::open_as(&place, id.clone(), None, true).await?, Client::open(&place, None).await?);
    for qos in 1..3 {
        first.subscribe(&format!("{base}/{qos}"), qos).await?;
    }
    first.close().await?;
    for number in 0..5 {
        for qos in 1..3 {
            sender.publish(&format!("{base}/{qos}"), &number.to_string(), qos, false).await?;
        }
    }
    let mut again = Client::open_as(&place, id, None, true).await?;
    let mut got = Vec::new();
    for _ in 0..10 {
        got.push(again.next().await?);
    }
    for qos in 1..3 {
        let mine: Vec<_> = got.iter().filter(|message| message.topic == format!("{base}/{qos}")).cloned().collect();
        let wanted: Vec<_> = (0..5).map(|n: i32| Message { topic: format!("{base}/{qos}"), payload: n.to_string(), qos, retain: false }).collect();
        expect(mine, wanted)?;
    }
    again.nothing().await?;
    again.close().await?;
    sender.close().await
}

#[tokio::main]
async fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let unique = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
    let place = Place {
        host: words[0].clone(),
        port: words[1].parse().unwrap(),
        transport: words[2].clone(),
        five: words[3] == "5",
        ca: words.get(4).map(|path| std::fs::read(path).unwrap()).unwrap_or_default(),
        prefix: format!("clients/{unique:x}"),
    };
    let checks: Vec<(&str, Pin<Box<dyn Future<Output = Result<()>>>>)> = vec![
        ("connect", Box::pin(connect(place.clone()))),
        ("qos0", Box::pin(level(place.clone(), 0))),
        ("qos1", Box::pin(level(place.clone(), 1))),
        ("qos2", Box::pin(level(place.clone(), 2))),
        ("wildcard", Box::pin(wildcard(place.clone()))),
        ("retained", Box::pin(retained(place.clone()))),
        ("will", Box::pin(will(place.clone()))),
        ("shared", Box::pin(shared(place.clone()))),
        ("resume", Box::pin(resume(place.clone()))),
    ];
    let mut found = BTreeMap::new();
    for (name, check) in checks {
        let result = match timeout(3 * WAIT, check).await {
            Ok(Ok(())) => "ok".into(),
            Ok(Err(wrong)) => wrong,
            Err(_) => "no end in time".into(),
        };
        found.insert(name, result);
    }
    println!("{}", serde_json::to_string(&found).unwrap());
}

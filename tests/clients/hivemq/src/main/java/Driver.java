import com.hivemq.client.mqtt.MqttClient;
import com.hivemq.client.mqtt.MqttClientBuilder;
import com.hivemq.client.mqtt.MqttClientSslConfig;
import com.hivemq.client.mqtt.MqttGlobalPublishFilter;
import com.hivemq.client.mqtt.datatypes.MqttQos;
import com.hivemq.client.mqtt.mqtt3.Mqtt3AsyncClient;
import com.hivemq.client.mqtt.mqtt3.message.publish.Mqtt3Publish;
import com.hivemq.client.mqtt.mqtt5.Mqtt5AsyncClient;
import com.hivemq.client.mqtt.mqtt5.message.publish.Mqtt5Publish;
import java.io.FileInputStream;
import java.io.InputStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.net.InetSocketAddress;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import javax.net.ssl.TrustManagerFactory;

/** Driver of the HiveMQ MQTT client. Arguments and output: tests/clients/script.py. */
public final class Driver {
    static final long WAIT_S = 10, QUIET_MS = 500;
    static String host, transport, version, prefix = "clients/" + UUID.randomUUID().toString().substring(0, 12);
    static int port, number;
    static TrustManagerFactory trust;

    record Message(String topic, String payload, int qos, boolean retain) {}

    /** A forwarder in front of the broker: the library has no way to end a connection without DISCONNECT. */
    static final class Forwarder {
        final ServerSocket server;
        final List<Socket> sockets = new ArrayList<>();

        Forwarder() throws Exception {
            server = new ServerSocket(0, 10, InetAddress.getByName("127.0.0.1"));
            Thread thread = new Thread(() -> {
                try {
                    Socket in = server.accept(), out = new Socket(host, port);
                    synchronized (sockets) {
                        sockets.add(in);
                        sockets.add(out);
                    }
                    pump(in, out);
                    pump(out, in);
                } catch (Exception end) {
                    // cut
                }
            });
            thread.setDaemon(true);
            thread.start();
        }

        static void pump(Socket from, Socket to) {
            Thread thread = new Thread(() -> {
                try {
                    from.getInputStream().transferTo(to.getOutputStream());
                    to.shutdownOutput();
                } catch (Exception end) {
                    // cut
                }
            });
            thread.setDaemon(true);
            thread.start();
        }

        void cut() throws Exception {
            synchronized (sockets) {
                for (Socket socket : sockets) socket.close();
            }
            server.close();
        }
    }

    static final class Client {
        final BlockingQueue<Message> messages = new LinkedBlockingQueue<>();
        final Forwarder forwarder;
        Mqtt3AsyncClient three;
        Mqtt5AsyncClient five;
        boolean present;

        Client(Message will) throws Exception {
            this(name(), will, false);
        }

        Client(String id, Message will, boolean keep) throws Exception {
            forwarder = will == null ? null : new Forwarder();
            InetSocketAddress address = new InetSocketAddress(host, forwarder == null ? port : forwarder.server.getLocalPort());
            MqttClientBuilder builder = MqttClient.builder().identifier(id).serverAddress(address);
            if (transport.equals("tls")) builder = builder.sslConfig(MqttClientSslConfig.builder().trustManagerFactory(trust).build());
            if (transport.equals("ws")) builder = builder.webSocketConfig().serverPath("mqtt").applyWebSocketConfig();
            if (version.equals("5")) {
                five = builder.useMqttVersion5().buildAsync();
                five.publishes(MqttGlobalPublishFilter.ALL, m -> messages.add(
                    new Message(m.getTopic().toString(), new String(m.getPayloadAsBytes()), m.getQos().getCode(), m.isRetain())));
                var connect = five.connectWith().cleanStart(!keep).sessionExpiryInterval(keep ? 3600 : 0);
                if (will != null) {
                    connect = connect.willPublish(Mqtt5Publish.builder().topic(will.topic()).payload(will.payload().getBytes())
                        .qos(MqttQos.fromCode(will.qos())).retain(will.retain()).build().asWill());
                }
                present = done(connect.send()).isSessionPresent();
            } else {
                three = builder.useMqttVersion3().buildAsync();
                three.publishes(MqttGlobalPublishFilter.ALL, m -> messages.add(
                    new Message(m.getTopic().toString(), new String(m.getPayloadAsBytes()), m.getQos().getCode(), m.isRetain())));
                var connect = three.connectWith().cleanSession(!keep);
                if (will != null) {
                    connect = connect.willPublish(Mqtt3Publish.builder().topic(will.topic()).payload(will.payload().getBytes())
                        .qos(MqttQos.fromCode(will.qos())).retain(will.retain()).build());
                }
                present = done(connect.send()).isSessionPresent();
            }
        }

        void subscribe(String topic, int qos) throws Exception {
            MqttQos asked = MqttQos.fromCode(qos);
            if (five != null) done(five.subscribeWith().topicFilter(topic).qos(asked).send());
            else done(three.subscribeWith().topicFilter(topic).qos(asked).send());
        }

        void publish(String topic, String payload, int qos, boolean retain) throws Exception {
            MqttQos asked = MqttQos.fromCode(qos);
            byte[] bytes = payload.getBytes();
            if (five != null) {
                var result = done(five.publishWith().topic(topic).payload(bytes).qos(asked).retain(retain).send());
                if (result.getError().isPresent()) throw new Exception(result.getError().get());
            } else {
                done(three.publishWith().topic(topic).payload(bytes).qos(asked).retain(retain).send());
            }
        }

        Message next() throws Exception {
            Message found = messages.poll(WAIT_S, TimeUnit.SECONDS);
            if (found == null) throw new Exception("no message");
            return found;
        }

        void nothing() throws Exception {
            Message found = messages.poll(QUIET_MS, TimeUnit.MILLISECONDS);
            if (found != null) throw new Exception("one message too many: " + found);
        }

        void disconnect() throws Exception {
            done(five != null ? five.disconnect() : three.disconnect());
        }
    }

    static String name() {
        return prefix.replace('/', '-') + "-" + ++number;
    }

    interface Check {
        void run() throws Exception;
    }

    static <T> T done(CompletableFuture<T> future) throws Exception {
        return future.get(WAIT_S, TimeUnit.SECONDS);
    }

    static void expect(Object got, Object wanted) throws Exception {
        if (!got.equals(wanted)) throw new Exception(got + ", not " + wanted);
    }

    static void qos(int level) throws Exception {
        String topic = prefix + "/qos" + level;
        Client receiver = new Client(null), sender = new Client(null);
        receiver.subscribe(topic, level);
        for (int i = 0; i < 5; i++) sender.publish(topic, "" + i, level, false);
        for (int i = 0; i < 5; i++) expect(receiver.next(), new Message(topic, "" + i, level, false));
        receiver.nothing();
        receiver.disconnect();
        sender.disconnect();
    }

    static void wildcard() throws Exception {
        Client one = new Client(null), all = new Client(null), sender = new Client(null);
        one.subscribe(prefix + "/w/+/c", 0);
        all.subscribe(prefix + "/w/#", 0);
        sender.publish(prefix + "/w/b/c", "both", 1, false);
        sender.publish(prefix + "/w/b/d", "one", 1, false);
        expect(one.next().topic(), prefix + "/w/b/c");
        expect(List.of(all.next().payload(), all.next().payload()), List.of("both", "one"));
        one.nothing();
        for (Client client : List.of(one, all, sender)) client.disconnect();
    }

    static void retained() throws Exception {
        String topic = prefix + "/retained";
        Client sender = new Client(null), first = new Client(null), second = new Client(null);
        sender.publish(topic, "kept", 1, true);
        first.subscribe(topic, 1);
        expect(first.next(), new Message(topic, "kept", 1, true));
        sender.publish(topic, "", 1, true);
        expect(first.next().retain(), false);
        second.subscribe(topic, 1);
        second.nothing();
        for (Client client : List.of(sender, first, second)) client.disconnect();
    }

    static void will() throws Exception {
        String topic = prefix + "/will";
        Client watcher = new Client(null);
        watcher.subscribe(topic, 1);
        new Client(new Message(topic, "left", 1, false)).disconnect();
        new Client(new Message(topic, "cut", 1, false)).forwarder.cut();
        expect(watcher.next().payload(), "cut");
        watcher.nothing();
        watcher.disconnect();
    }

    static void shared() throws Exception {
        String topic = prefix + "/shared";
        List<Client> members = List.of(new Client(null), new Client(null));
        Client sender = new Client(null);
        for (Client member : members) member.subscribe("$share/g/" + topic, 1);
        List<String> wanted = new ArrayList<>(), got = new ArrayList<>();
        for (int i = 0; i < 10; i++) {
            sender.publish(topic, "" + i, 1, false);
            wanted.add("" + i);
        }
        for (long end = System.nanoTime() + WAIT_S * 1_000_000_000L; got.size() < 10 && System.nanoTime() < end; ) {
            for (Client member : members) {
                Message message = member.messages.poll(20, TimeUnit.MILLISECONDS);
                if (message != null) got.add(message.payload());
            }
        }
        got.sort(null);
        expect(got, wanted);
        for (Client member : members) {
            member.nothing();
            member.disconnect();
        }
        sender.disconnect();
    }

    static void resume() throws Exception {
        String base = prefix + "/resume", id = name();
        Client first = new Client(id, null, true), sender = new Client(null);
        for (int qos = 1; qos < 3; qos++) first.subscribe(base + "/" + qos, qos);
        first.disconnect();
        for (int i = 0; i < 5; i++) {
            for (int qos = 1; qos < 3; qos++) sender.publish(base + "/" + qos, "" + i, qos, false);
        }
        Client again = new Client(id, null, true);
        expect(again.present, true);
        Map<Integer, List<String>> got = new LinkedHashMap<>(Map.of(1, new ArrayList<>(), 2, new ArrayList<>()));
        for (int i = 0; i < 10; i++) {
            Message message = again.next();
            expect(message.topic(), base + "/" + message.qos());
            got.get(message.qos()).add(message.payload());
        }
        for (int qos = 1; qos < 3; qos++) expect(got.get(qos), List.of("0", "1", "2", "3", "4"));
        again.nothing();
        again.disconnect();
        sender.disconnect();
    }

    public static void main(String[] words) throws Exception {
        host = words[0];
        port = Integer.parseInt(words[1]);
        transport = words[2];
        version = words[3];
        if (words.length > 4) {
            KeyStore store = KeyStore.getInstance(KeyStore.getDefaultType());
            store.load(null, null);
            try (InputStream pem = new FileInputStream(words[4])) {
                store.setCertificateEntry("ca", CertificateFactory.getInstance("X.509").generateCertificate(pem));
            }
            trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
            trust.init(store);
        }
        Map<String, Check> checks = new LinkedHashMap<>();
        checks.put("connect", () -> new Client(null).disconnect());
        for (int level = 0; level < 3; level++) {
            int qos = level;
            checks.put("qos" + qos, () -> qos(qos));
        }
        checks.put("wildcard", Driver::wildcard);
        checks.put("retained", Driver::retained);
        checks.put("will", Driver::will);
        checks.put("shared", Driver::shared);
        checks.put("resume", Driver::resume);
        StringBuilder out = new StringBuilder("{");
        for (Map.Entry<String, Check> check : checks.entrySet()) {
            String result = "ok";
            try {
                check.getValue().run();
            } catch (Throwable wrong) {
                result = String.valueOf(wrong).replaceAll("[\"\\\\\\p{Cntrl}]", " ");
            }
            out.append(out.length() > 1 ? ", " : "").append("\"" + check.getKey() + "\": \"" + result + "\"");
        }
        System.out.println(out.append("}"));
        System.exit(0);
    }
}

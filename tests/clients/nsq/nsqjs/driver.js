// nsqjs: node driver.js TCP_HOST:PORT LOOKUP_HOST:PORT TOPIC. Plays the script of script.py.
const nsq = require('nsqjs')

const [tcp, lookup, topic] = process.argv.slice(2)
const [host, port] = tcp.split(':')
const finished = {}
const attempts = {}
let delayedAt = 0
let cameAt = 0
const wanted = [...Array(20).keys()].map((n) => `pub-${n}`).concat([...Array(10).keys()].map((n) => `mpub-${n}`), ['dpub'])

function show() {
  const found = {}
  for (const kind of ['pub', 'mpub', 'dpub']) {
    const wrong = wanted.filter((name) => name.split('-')[0] === kind && finished[name] !== 1)
    found[kind] = wrong.length ? `not finished once: ${wrong}` : 'ok'
  }
  if (found.dpub === 'ok' && cameAt - delayedAt < 950) found.dpub = `came after ${cameAt - delayedAt} ms`
  found.requeue = attempts['pub-3'] === 2 ? 'ok' : `attempts ${attempts['pub-3']}`
  found.touch = finished['pub-4'] === 1 ? 'ok' : 'not finished'
  process.stdout.write(JSON.stringify(found) + '\n', () => process.exit(0))
}

function consume() {
  const reader = new nsq.Reader(topic, 'work', { lookupdHTTPAddresses: lookup, maxInFlight: 5, lookupdPollInterval: 1 })
  reader.on('error', () => {})
  reader.on('message', (message) => {
    const body = message.body.toString()
    attempts[body] = Math.max(attempts[body] || 0, message.attempts)
    if (body === 'dpub') cameAt = cameAt || Date.now()
    if (body === 'pub-3' && message.attempts === 1) return message.requeue(100, false)
    if (body === 'pub-4') message.touch()
    message.finish()
    finished[body] = (finished[body] || 0) + 1
    if (wanted.every((name) => finished[name])) setTimeout(show, 100)
  })
  reader.connect()
}

const writer = new nsq.Writer(host, Number(port))
writer.on('ready', async () => {
  const said = (call) => new Promise((resolve, reject) => call((error) => (error ? reject(error) : resolve())))
  for (let n = 0; n < 20; n++) await said((done) => writer.publish(topic, `pub-${n}`, done))
  await said((done) => writer.publish(topic, [...Array(10).keys()].map((n) => `mpub-${n}`), done))
  delayedAt = Date.now()
  await said((done) => writer.deferPublish(topic, ['dpub'], 1000, done))
  consume()
})
writer.on('error', (error) => process.stderr.write(`${error}\n`))
writer.connect()
setTimeout(show, 60000)

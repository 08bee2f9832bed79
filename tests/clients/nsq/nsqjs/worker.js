// nsqjs until it is killed: node worker.js produce|consume TCP,… LOOKUP,… TOPIC NAME. As pynsq_worker.py.
const nsq = require('nsqjs')

const [what, tcp, lookup, topic, name] = process.argv.slice(2)
const WINDOW = 20
let number = 0

function produce() {
  const [host, port] = tcp.split(',')[0].split(':')
  const writer = new nsq.Writer(host, Number(port))
  const publish = () => {
    const body = `${name}-${++number}`
    writer.publish(topic, body, (error) => {
      if (!error) process.stdout.write(body + '\n')
      setTimeout(publish, 200)
    })
  }
  writer.on('ready', () => { for (let n = 0; n < WINDOW; n++) publish() })
  writer.on('error', () => {})
  writer.on('closed', () => process.exit(1)) // whoever started it starts it again
  writer.connect()
}

function consume() {
  const reader = new nsq.Reader(topic, 'work', {
    lookupdHTTPAddresses: lookup.split(','), maxInFlight: 50, lookupdPollInterval: 1, maxBackoffDuration: 0
  })
  reader.on('error', () => {})
  reader.on('message', (message) => {
    process.stdout.write(message.body.toString() + '\n', () => message.finish())
  })
  reader.connect()
}

if (what === 'produce') produce()
else consume()

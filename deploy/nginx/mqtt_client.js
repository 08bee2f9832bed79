// Finds the client ID in the first packet of an MQTT client, for nginx.conf. Source: OASIS MQTT 5.0, section 3.1.

const CONNECT = 0x10;
const FIRST = 5; // bytes that hold the type and the longest remaining length
const MORE = -1;
const NONE = -2;

// Number of bytes up to and including the remaining length; MORE, or NONE for what is no CONNECT.
function header(data) {
    if (data.length < 2) return MORE;
    if (data[0] !== CONNECT) return NONE;
    for (let at = 1; at < FIRST; at++) {
        if (at >= data.length) return MORE;
        if (data[at] < 0x80) return at + 1;
    }
    return NONE;
}

function length(data, at) {
    return data.length < at + 2 ? MORE : data[at] << 8 | data[at + 1];
}

// Position of the properties of version 5 after their length, and the length; null if more bytes are needed.
function properties(data, at) {
    let size = 0;
    for (let shift = 0; shift < 28; shift += 7, at++) {
        if (at >= data.length) return null;
        size |= (data[at] & 0x7f) << shift;
        if (data[at] < 0x80) break;
    }
    return at + 1 + size;
}

// The client ID; null if more bytes are needed, empty if there is none.
function parse(data) {
    const start = header(data);
    if (start === MORE) return null;
    if (start === NONE) return '';
    const name = length(data, start);
    if (name === MORE) return null;
    if (name !== 4 && name !== 6) return '';
    const level = start + 2 + name;
    if (data.length < level + 4) return null;
    let at = level + 4; // after level, flags and keep-alive
    if (data[level] === 5) {
        at = properties(data, at);
        if (at === null) return null;
    }
    const size = length(data, at);
    if (size === MORE || data.length < at + 2 + size) return null;
    return data.slice(at + 2, at + 2 + size).toString('utf8');
}

let found = '';

function preread(s) {
    s.on('upstream', function (data, flags) {
        const id = parse(data);
        if (id === null && !flags.last) return;
        found = id || '';
        s.done();
    });
}

// What the hash is computed of: the client ID, or for a client without one something of its own.
function client(s) {
    return found || s.remoteAddress + ':' + s.variables.remote_port;
}

export default {preread, client};

// Tab "Live": devices of running processes, rates from totals, warnings for staged bytes.
import { ago, bytes, commandLine, count, embedded, h, put, rate, s, setText, token } from './util.js';
import { sparkline } from './chart.js';

const PATH_NAMES = ['cpu', 'window', 'copy-engine', 'dma-buf', 'peermem', 'staged'];
const HISTORY = 120;
const live = { devices: new Map(), nodes: {}, paused: false, ended: true, last: 0, source: null, trouble: null };

const total = (side, path) => (side && side[path] && side[path].bytes) || 0;
const operations = (side, path) => (side && side[path] && side[path].operations) || 0;

export function startLive(host, badge) {
  const { nodes } = live;
  nodes.badge = badge;
  nodes.state = h('span', { className: 'live-state', role: 'status' }, 'Connecting');
  nodes.alert = h('div', { className: 'staged-alert', role: 'alert', hidden: true });
  nodes.sums = h('div', { className: 'sums' });
  nodes.cards = h('div', { className: 'devices' });
  const pause = h('button', { type: 'button', 'aria-pressed': 'false' }, 'Pause');
  pause.addEventListener('click', () => {
    live.paused = !live.paused;
    pause.setAttribute('aria-pressed', live.paused);
    pause.textContent = live.paused ? 'Resume' : 'Pause';
    if (!live.paused) renderLive();
  });
  const ended = h('input', { type: 'checkbox', checked: true, name: 'ended' });
  ended.addEventListener('change', () => { live.ended = ended.checked; renderLive(); });
  put(host, h('div', { className: 'head-row' }, nodes.state, h('div', { className: 'filters' }, h('label', { className: 'check' }, ended, 'Show ended devices'), !embedded && pause)), nodes.alert, nodes.sums, nodes.cards);
  if (embedded) {
    if (embedded.live) { takeEvent(embedded.live); nodes.state.textContent = `Totals when the report was made: ${new Date(embedded.live.time * 1000).toLocaleString()}`; } else {
      nodes.state.textContent = 'A report has no live view. Run nobounce ui.';
    }
    return;
  }
  // A browser opens six connections to a server: tabs in the background must not hold them all.
  document.addEventListener('visibilitychange', follow);
  follow();
}

/** Follows the events while the page is visible. */
function follow() {
  const { nodes } = live;
  if (document.hidden) { live.source?.close(); live.source = null; return; }
  if (live.source) return;
  const source = live.source = new EventSource(`api/live?token=${encodeURIComponent(token)}`);
  source.addEventListener('open', () => { setText(nodes.state, 'Connected'); });
  source.addEventListener('message', event => { takeEvent(JSON.parse(event.data)); setText(nodes.state, live.paused ? 'Paused' : 'Connected, one update per second'); });
  source.addEventListener('error', () => {
    setText(nodes.state, source.readyState === 2 ? 'The server refused the connection.' : 'Connection lost. Trying again.');
  });
}

function takeEvent(event) {
  const now = event.time;
  live.trouble = event.trouble || null;
  for (const d of live.devices.values()) d.present = false;
  for (const device of event.devices) {
    const old = live.devices.get(device.id);
    const entry = old || { history: [], rates: null };
    const span = old ? now - old.time : 0;
    const before = old && old.data;
    const delta = (a, b) => span > 0 && a >= b ? (a - b) / span : 0;
    const rates = { out: {}, in: {}, links: {}, total: 0, staged: 0 };
    for (const side of ['out', 'in']) {
      for (const path of PATH_NAMES) {
        const value = before ? delta(total(device[side], path), total(before[side], path)) : 0;
        rates[side][path] = value;
        rates.total += value;
        if (path === 'staged') rates.staged += value;
      }
    }
    for (const name of Object.keys(device.links || {})) {
      const a = device.links[name], b = before && before.links && before.links[name] || { out: 0, in: 0 };
      rates.links[name] = before ? { out: delta(a.out, b.out), in: delta(a.in, b.in) } : { out: 0, in: 0 };
    }
    rates.cpu = before ? delta(device.engine_cpu_s, before.engine_cpu_s) : 0;
    rates.retransmissions = before ? delta(device.retransmissions, before.retransmissions) : 0;
    // One value per second, also for seconds without an event.
    const seconds = before ? Math.min(HISTORY, Math.max(1, Math.round(span))) : 0;
    for (let i = 0; i < seconds; i += 1) entry.history.push({ total: rates.total, staged: rates.staged });
    entry.history.splice(0, entry.history.length - HISTORY);
    Object.assign(entry, { data: device, time: now, rates, present: true });
    live.devices.set(device.id, entry);
  }
  for (const [id, d] of live.devices) if (!d.present) live.devices.delete(id);
  live.last = now;
  warn();
  if (!live.paused) renderLive();
}

const title = data => data.pid ? `${data.command} (${data.pid})` : data.command;
/** The program's own threads do most of the work, which engine CPU does not count. */
const isCaller = d => d.data.progress === 'caller';
const stagedBytes = d => total(d.data.out, 'staged') + total(d.data.in, 'staged');

function warn() {
  const staged = [...live.devices.values()].filter(d => stagedBytes(d) > 0);
  const { alert, badge } = live.nodes;
  badge.hidden = !staged.length;
  const names = staged.map(d => d.data.id).join(' ');
  if (!staged.length) { alert.hidden = true; return; }
  const sum = staged.reduce((a, d) => a + stagedBytes(d), 0), now = staged.reduce((a, d) => a + d.rates.staged, 0);
  const reasons = [...new Set(staged.flatMap(d => d.data.staged_reasons || []))];
  if (alert.dataset.names !== names || alert.dataset.reasons !== String(reasons.length)) {
    alert.dataset.names = names;
    alert.dataset.reasons = String(reasons.length);
    live.nodes.stagedSum = h('span', { 'aria-live': 'off' });
    put(alert, h('p', {}, h('b', {}, 'Staged bytes'), ' ', live.nodes.stagedSum),
      h('p', {}, staged.map(d => `${title(d.data)}, ${d.data.device}`).join('; ')),
      reasons.length ? h('ul', { className: 'plain' }, reasons.map(r => h('li', {}, `Reason: ${r}`))) : h('p', {}, 'The device gave no reason.'));
  }
  live.nodes.stagedSum.textContent = `${bytes(sum)} so far${now > 0 ? `, ${rate(now)} now` : ', none now'}`;
  alert.classList.toggle('now', now > 0);
  alert.hidden = false;
}

function renderLive() {
  const all = [...live.devices.values()];
  const order = { live: 0, killed: 1, ended: 2 };
  const shown = all.filter(d => live.ended || d.data.state === 'live')
    .sort((a, b) => order[a.data.state] - order[b.data.state] || a.data.since - b.data.since);
  sums(all);
  const { cards } = live.nodes;
  const focused = document.activeElement && document.activeElement.closest && document.activeElement.closest('.device')?.dataset.id;
  const open = new Set([...cards.querySelectorAll('details[open]')].map(d => d.closest('.device').dataset.id));
  if (!shown.length) {
    put(cards, h('div', { className: 'empty' }, embedded ? 'No device was open.' : [h('p', {}, live.trouble || 'No device is open. Start a program:'), live.trouble ? null : commandLine('nobounce run -- PROGRAM')]));
    return;
  }
  put(cards, shown.map(d => deviceCard(d, open.has(d.data.id))));
  if (focused) cards.querySelector(`.device[data-id="${CSS.escape(focused)}"] summary`)?.focus();
}

function sums(all) {
  const active = all.filter(d => d.data.state === 'live');
  const one = side => Object.fromEntries(PATH_NAMES.map(p => [p, embedded ? all.reduce((a, d) => a + total(d.data[side], p), 0) : active.reduce((a, d) => a + d.rates[side][p], 0)]));
  const shown = embedded ? bytes : rate;
  const out = one('out'), inward = one('in');
  const top = Math.max(1, ...PATH_NAMES.flatMap(p => [out[p], inward[p]]));
  const used = path => all.some(d => total(d.data.out, path) + total(d.data.in, path) > 0);
  const bar = (value, path) => h('td', { className: 'barcell' }, s('svg', { viewBox: '0 0 100 8', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
    s('rect', { class: `bar ${path === 'staged' ? 'k-staged' : 'k-direct'}`, x: 0, y: 0, width: value / top * 100, height: 8 })), h('span', {}, shown(value)));
  const linkSum = (n, side) => embedded ? all.reduce((a, d) => a + (d.data.links?.[n]?.[side] || 0), 0) : active.reduce((a, d) => a + (d.rates.links[n]?.[side] || 0), 0);
  const links = ['shm', 'udp'].map(n => [n, linkSum(n, 'out'), linkSum(n, 'in')]);
  put(live.nodes.sums, h('section', {}, h('h2', {}, embedded ? 'Bytes by path' : 'Throughput by path'),
    h('table', { className: 'paths' }, h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'Path'), h('th', { scope: 'col' }, 'Out'), h('th', { scope: 'col' }, 'In'))),
      h('tbody', {}, PATH_NAMES.map(p => h('tr', { className: `${used(p) ? '' : 'idle'}${p === 'staged' && used(p) ? ' staged-row' : ''}` }, h('th', { scope: 'row' }, p), bar(out[p], p), bar(inward[p], p)))))),
  h('section', {}, h('h2', {}, 'Links and engines'),
    h('dl', { className: 'facts' },
      links.map(([n, o, i]) => [h('dt', {}, n === 'shm' ? 'Shared memory' : 'UDP'), h('dd', {}, `out ${shown(o)}, in ${shown(i)}`)]),
      h('dt', {}, 'Engine CPU'), h('dd', {}, embedded ? `${all.reduce((a, d) => a + d.data.engine_cpu_s, 0).toFixed(1)} s` : `${Math.round(active.reduce((a, d) => a + d.rates.cpu, 0) * 100)} % of one core${active.some(isCaller) ? ', besides the threads of programs (caller mode)' : ''}`),
      h('dt', {}, 'Retransmissions'), h('dd', {}, count(all.reduce((a, d) => a + d.data.retransmissions, 0))),
      h('dt', {}, 'Dropped packets'), h('dd', {}, count(all.reduce((a, d) => a + d.data.dropped, 0))),
      h('dt', {}, 'Lost packets'), h('dd', {}, count(all.reduce((a, d) => a + d.data.lost, 0))),
      h('dt', {}, 'Errors'), h('dd', {}, count(all.reduce((a, d) => a + (d.data.errors || []).reduce((x, e) => x + e.count, 0), 0))),
      h('dt', {}, 'Devices'), h('dd', {}, ['live', 'ended', 'killed'].map(x => [x, all.filter(d => d.data.state === x).length]).filter(([x, n]) => n || x !== 'killed').map(([x, n]) => `${n} ${x}`).join(', ')))));
}

const STATES = { live: 'live', ended: 'ended', killed: 'killed' };

function deviceCard(d, open) {
  const { data, rates } = d;
  const staged = stagedBytes(d), errors = data.errors || [];
  const alive = data.state === 'live';
  const cells = side => PATH_NAMES.filter(p => total(data.out, p) + total(data.in, p) > 0).map(p => [p, total(data[side], p), operations(data[side], p), rates[side][p]]);
  const rows = cells('out').map(([p, b, o, r], i) => { const inward = cells('in')[i]; return h('tr', { className: p === 'staged' ? 'staged-row' : '' }, h('th', { scope: 'row' }, p),
    embedded ? null : [h('td', { className: 'r' }, rate(r)), h('td', { className: 'r' }, rate(inward[3]))], h('td', { className: 'r' }, bytes(b)), h('td', { className: 'r' }, bytes(inward[1])), h('td', { className: 'r wide-only' }, count(o + inward[2]))); });
  const details = h('details', { open }, h('summary', {}, 'Links, peers, counters'), h('dl', { className: 'facts' },
    Object.entries(data.links || {}).map(([n, l]) => [h('dt', {}, n === 'shm' ? 'Shared memory' : n.toUpperCase()), h('dd', {}, `out ${bytes(l.out)}, in ${bytes(l.in)}`)]),
    data.address && [h('dt', {}, 'Address'), h('dd', { className: 'mono' }, data.address)], h('dt', {}, 'Queue pairs'), h('dd', {}, count(data.queue_pairs)),
    h('dt', {}, 'Peers'), h('dd', { className: 'mono' }, (data.peers || []).length ? data.peers.join(', ') : 'none'),
    h('dt', {}, 'Engine CPU'), h('dd', {}, `${data.engine_cpu_s.toFixed(2)} s in total${isCaller(d) ? '; not counted: the program\'s own threads, which drive the device (caller mode)' : ''}`)));
  const flag = (value, text, bad) => value > 0 || !bad ? h('span', { className: bad && value > 0 ? 'flag bad' : 'flag' }, text) : null;
  return h('article', { className: `device st-${data.state}${staged ? ' has-staged' : ''}`, 'data-id': data.id, 'aria-label': `${title(data)}, ${data.device}` },
    h('header', {}, h('h3', {}, data.command), h('span', { className: 'muted mono' }, [data.pid || null, data.device].filter(Boolean).join(' ')), h('span', { className: `badge st-${data.state}` }, STATES[data.state] || data.state),
      h('span', { className: 'muted' }, `opened ${ago(live.last - data.since)} ago`)),
    staged ? h('p', { className: 'staged-line' }, h('b', {}, `Staged: ${bytes(staged)}`), rates.staged > 0 ? `, ${rate(rates.staged)} now` : '', (data.staged_reasons || []).length ? `. Reason: ${data.staged_reasons.join('; ')}` : '') : null,
    embedded ? null : h('div', { className: 'spark-row' }, h('div', {}, sparkline(d.history, HISTORY, `Throughput of the last two minutes, now ${rate(rates.total)}`), h('span', { className: 'muted' }, 'last 2 minutes')), h('div', { className: 'spark-now' }, h('b', {}, rate(rates.total)), h('span', { className: 'muted' }, `peak ${rate(Math.max(0, ...d.history.map(x => x.total)))}`))),
    rows.length ? h('table', { className: 'paths small' }, h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'Path'), [...(embedded ? [] : ['Out', 'In']), 'Out, total', 'In, total'].map(t => h('th', { scope: 'col', className: 'r' }, t)), h('th', { scope: 'col', className: 'r wide-only' }, 'Operations'))), h('tbody', {}, rows)) : h('p', { className: 'muted' }, 'No bytes yet.'),
    h('p', { className: 'flags' }, alive && !embedded && flag(1, `engine ${Math.round(rates.cpu * 100)} % CPU${isCaller(d) ? ', besides the program\'s threads (caller mode)' : ''}`), flag(data.retransmissions, `${count(data.retransmissions)} retransmissions`, true), flag(data.dropped, `${count(data.dropped)} dropped`, true), flag(data.lost, `${count(data.lost)} lost`, true),
      !errors.length && !data.retransmissions && !data.dropped && !data.lost ? h('span', { className: 'flag' }, 'no loss, no errors') : null),
    (data.udp_reasons || []).length ? h('p', { className: 'udp-line' }, h('b', {}, 'UDP on this machine: '), data.udp_reasons.join('; ')) : null,
    errors.length ? h('ul', { className: 'errors' }, errors.map(e => h('li', {}, h('b', {}, `${count(e.count)} x ${e.status}`), e.reason ? `: ${e.reason}` : ''))) : null, details);
}

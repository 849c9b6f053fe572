// Tab "What to expect": the predictor as a calculator.
import { api, embedded, factor, field, h, micros, num, put, s, select, size, DISTANCES } from './util.js';
import { chart } from './chart.js';
import { clusterView } from './cluster.js';

const LINKS = [['ib:edr', 'InfiniBand EDR, 100 Gb/s'], ['ib:hdr', 'InfiniBand HDR, 200 Gb/s'], ['ib:ndr', 'InfiniBand NDR, 400 Gb/s'],
  ['ib:xdr', 'InfiniBand XDR, 800 Gb/s'], ['rocev2:25', 'RoCEv2, 25 Gb/s'], ['rocev2:100', 'RoCEv2, 100 Gb/s'], ['rocev2:200', 'RoCEv2, 200 Gb/s'],
  ['rocev2:400', 'RoCEv2, 400 Gb/s'], ['rocev2:800', 'RoCEv2, 800 Gb/s'], ['efa:100', 'EFA, 100 Gb/s'], ['efa:200', 'EFA, 200 Gb/s'], ['iwarp:100', 'iWARP, 100 Gb/s']];
const SLOTS = ['gen3x8', 'gen3x16', 'gen4x8', 'gen4x16', 'gen5x8', 'gen5x16', 'gen6x16'];
const slotName = slot => slot ? slot.replace(/^gen(\d)x/, 'Gen$1 x') : 'none';
const linkName = link => (LINKS.find(([v]) => v === (GRADES[link] || link)) || [0, link])[1];
const CONTROLS = [
  ['link', 'Network link', LINKS, p => linkName(p.link).replace('InfiniBand', 'IB')],
  ['nic-slot', 'PCIe slot of the adapter', SLOTS.map(x => [x, slotName(x)]), p => slotName(p.nic)],
  ['gpu-slot', 'PCIe slot of the GPU', SLOTS.map(x => [x, slotName(x)]), p => slotName(p.gpu)],
  ['distance', 'Distance GPU to adapter', Object.entries(DISTANCES).map(([k, v]) => [k, `${k}: ${v}`]), p => p.distance],
  ['mtu', 'Path MTU', [256, 512, 1024, 2048, 4096].map(x => [String(x), `${x} B`]), p => `${p.mtu} B`],
  ['memory', 'Memory', [['gpu', 'GPU memory'], ['host', 'host memory']], p => p.memory === 'gpu' ? 'GPU memory' : 'host memory'],
  ['op', 'Operation', [['write', 'WRITE'], ['read', 'READ']], p => p.operation.toUpperCase()],
  ['software', 'Software', [['verbs', 'verbs'], ['mpi', 'MPI'], ['nixl', 'NIXL'], ['nccl', 'NCCL'], ['nobounce', 'software NIC of nobounce']], p => p.software],
  ['platform', 'Processor', ['intel-client', 'xeon-old', 'xeon-skylake', 'sapphire-rapids', 'emerald-rapids', 'zen', 'grace', 'other'].map(x => [x, x]), p => p.platform],
  ['max-payload', 'PCIe MaxPayload', [128, 256, 512].map(x => [String(x), `${x} B`]), p => `${p.max_payload} B`],
  ['max-read-request', 'MaxReadReq', [512, 1024, 2048, 4096].map(x => [String(x), `${x} B`]), p => `${p.max_read_request} B`],
];
const SLIDERS = [['rails', 'Rails', 1, 8], ['sharers', 'GPUs per adapter', 1, 8], ['hops', 'Network switches', 0, 6]];
const GRADES = { 'ib:100': 'ib:edr', 'ib:200': 'ib:hdr', 'ib:400': 'ib:ndr', 'ib:800': 'ib:xdr' };
const TABLE_KEYS = ['link', 'nic-slot', 'distance', 'rails'];
const EXPECT_SIZES = Array.from({ length: 28 }, (_, i) => 8 * 2 ** i);

const expect = { values: {}, at: 17, base: 'this', answer: null, nodes: {}, busy: null };

/** A row of the compact table as a row of predict --json. */
function expandRow([bytes, direct, reason, staged, unknown]) {
  const estimate = e => e && { size: bytes, microseconds: { expected: e[0], low: e[1], high: e[2] },
    gbytes_per_s: { expected: e[3], low: e[4], high: e[5] }, binds: e[6], stream_binds: e[7], shares: e[8] || [] };
  return { size: bytes, direct: estimate(direct), not_direct: reason, not_predicted: unknown, staged: estimate(staged), unpipelined: null };
}
const expand = value => value.schema ? value : { parts: null, upgrades: [], ...value, rows: value.rows.map(expandRow) };

export function startExpect(host, machines, current) {
  expect.base = current;
  expect.nodes = { out: h('div', { className: 'answer' }), error: h('p', { className: 'error', role: 'alert', hidden: true }) };
  const table = embedded && embedded.predict && embedded.predict.table || {};
  const controls = embedded ? reportControls(table) : servedControls(machines);
  const cluster = h('section', { className: 'cluster' });
  put(host, h('div', { className: 'calc' }, h('form', { className: 'controls', 'aria-label': 'Parts', onsubmit: e => e.preventDefault() }, controls),
    h('div', { className: 'results' }, expect.nodes.error, expect.nodes.out)), cluster);
  clusterView(cluster, partsQuery);
  ask();
}

function sizeSlider() {
  const text = h('output', {}, size(EXPECT_SIZES[expect.at]));
  const input = h('input', { type: 'range', min: 0, max: EXPECT_SIZES.length - 1, step: 1, id: 'size', name: 'size' });
  input.value = expect.at;
  input.setAttribute('aria-valuetext', text.textContent);
  input.addEventListener('input', () => {
    expect.at = Number(input.value);
    text.textContent = size(EXPECT_SIZES[expect.at]);
    input.setAttribute('aria-valuetext', text.textContent);
    if (expect.answer) renderAnswer();
  });
  return field(['Message size ', text], input);
}

function servedControls(machines) {
  const base = select({ name: 'machine' }, machines, expect.base);
  base.addEventListener('change', () => { expect.base = base.value; ask(); });
  document.addEventListener('machine-chosen', event => { expect.base = base.value = event.detail; ask(); });
  const make = ([name, label, options]) => {
    const control = select({ name }, [['', 'as found'], ...options], '');
    control.addEventListener('change', () => {
      expect.values[name] = control.value;
      if (name === 'memory') for (const other of GPU_ONLY) control.form.elements[other].disabled = control.value === 'host';
      ask();
    });
    return field(label, control);
  };
  const slide = ([name, label, low, high]) => {
    const text = h('output', {}, 'as found');
    const input = h('input', { type: 'range', name, min: low - 1, max: high, step: 1 });
    input.value = low - 1;
    input.setAttribute('aria-valuetext', 'as found');
    input.addEventListener('input', () => {
      const off = Number(input.value) < low;
      text.textContent = off ? 'as found' : input.value;
      input.setAttribute('aria-valuetext', text.textContent);
      expect.values[name] = off ? '' : input.value;
      askSoon();
    });
    return field([`${label} `, text], input);
  };
  const strict = h('input', { type: 'checkbox', name: 'strict-order' });
  strict.addEventListener('change', () => { expect.values['strict-order'] = strict.checked ? 'true' : ''; ask(); });
  const reset = h('button', { type: 'button', onclick: () => {
    expect.values = {};
    for (const node of reset.form.elements) {
      if (node.name === 'machine' || node.name === 'size') continue;
      if (node.type === 'checkbox') node.checked = false;
      else if (node.type === 'range') { node.value = node.min; node.previousSibling.querySelector('output').textContent = 'as found'; node.setAttribute('aria-valuetext', 'as found'); }
      else if (node.tagName === 'SELECT') { node.value = ''; node.disabled = false; }
    }
    ask();
  } }, 'Reset parts');
  return [field('Machine', base), sizeSlider(), CONTROLS.slice(0, 4).map(make), slide(SLIDERS[0]),
    h('label', { className: 'check' }, strict, 'Strict PCIe ordering (relaxed ordering is off)'),
    h('details', { className: 'more' }, h('summary', {}, 'More parts'), h('div', { className: 'more-body' }, CONTROLS.slice(4).map(make), SLIDERS.slice(1).map(slide))), reset];
}

function reportControls(table) {
  const keys = Object.keys(table).map(k => k.split('|'));
  const whole = embedded.predict && embedded.predict.machine;
  const options = TABLE_KEYS.map((_, i) => [...new Set(keys.map(k => k[i]))]);
  const names = [linkName, slotName, v => `${v}: ${DISTANCES[v] || ''}`, v => v];
  const labels2 = ['Network link', 'PCIe slot of the adapter', 'Distance GPU to adapter', 'Rails'];
  const off = !keys.length;
  const parts = whole && whole.parts;
  const found = parts ? [GRADES[parts.link] || parts.link, parts.nic, parts.distance, String(parts.rails)] : [];
  const controls = TABLE_KEYS.map((name, i) => {
    const first = whole ? [['', 'as found']] : [];
    const control = select({ name, disabled: off }, [...first, ...options[i].map(v => [v, names[i](v)])]);
    if (!whole && keys.length) expect.values[name] = control.value = keys[0][i];
    control.addEventListener('change', () => {
      expect.values[name] = control.value;
      settle(controls, keys, i, found);
      ask();
    });
    return control;
  });
  const rest = CONTROLS.filter(([name]) => !TABLE_KEYS.includes(name)).map(([name, label]) => field(label, select({ name, disabled: true }, [['', 'as found']])));
  return [sizeSlider(), controls.map((c, i) => field(labels2[i], c)),
    h('p', { className: 'note' }, 'This report holds precomputed predictions. To change the other parts, run nobounce ui.'),
    h('details', { className: 'more' }, h('summary', {}, 'More parts'), h('div', { className: 'more-body' }, rest))];
}

/** Keeps the choice inside the table: the other controls follow the one just changed. */
function settle(controls, keys, changed, found) {
  if (controls[changed].value === '') {
    for (const c of controls) { c.value = ''; expect.values[c.name] = ''; }
    return;
  }
  const wanted = controls.map((c, i) => c.value || found[i]);
  const best = keys.filter(k => k[changed] === wanted[changed])
    .map(k => [k.filter((v, i) => v === wanted[i]).length, k]).sort((a, b) => b[0] - a[0])[0];
  if (best) controls.forEach((c, i) => { c.value = best[1][i]; expect.values[c.name] = c.value; });
}

const GPU_ONLY = ['gpu-slot', 'distance'];
/** The options of predict; parts of the GPU do not go with host memory. */
function partsQuery() {
  const query = { machine: expect.base === 'this' ? '' : expect.base, ...expect.values };
  if (query.memory === 'host') for (const name of GPU_ONLY) delete query[name];
  return query;
}

let askTimer;
const askSoon = () => { clearTimeout(askTimer); askTimer = setTimeout(ask, 120); };

async function ask() {
  if (embedded) {
    const { predict } = embedded;
    const id = TABLE_KEYS.map(k => expect.values[k]).join('|');
    const found = predict && (predict.table && predict.table[id] || predict.machine);
    if (!found) { put(expect.nodes.out, h('p', { className: 'empty' }, 'This report holds no prediction.')); return; }
    expect.answer = expand(found);
    renderAnswer();
    return;
  }
  expect.busy?.abort();
  const busy = expect.busy = new AbortController();
  try {
    document.dispatchEvent(new CustomEvent('parts-changed'));
    expect.answer = await api('predict', { ...partsQuery(), size: '8..1G' }, busy.signal);
    expect.nodes.error.hidden = true;
    renderAnswer();
  } catch (error) {
    if (error.name === 'AbortError') return;
    expect.nodes.error.textContent = error.message;
    expect.nodes.error.hidden = false;
  }
}

const lineOf = (rows, path, unit) => rows.filter(r => r[path]).map(r => { const e = r[path][unit]; return [r.size, e.expected, e.low, e.high]; });

/** The lines of a prediction for a chart. */
export function predictionSeries(answer, unit) {
  const lines = [{ name: answer.rows.some(r => r.staged) ? 'direct' : 'expected', kind: 'direct', points: lineOf(answer.rows, 'direct', unit) },
    { name: 'staged', kind: 'staged', points: lineOf(answer.rows, 'staged', unit) }];
  return lines.filter(l => l.points.length);
}

function renderAnswer() {
  const { answer, nodes } = expect;
  const want = EXPECT_SIZES[expect.at];
  const row = answer.rows.reduce((a, b) => Math.abs(Math.log(b.size / want)) < Math.abs(Math.log(a.size / want)) ? b : a);
  const open = new Set([...nodes.out.querySelectorAll('details')].map((d, i) => d.open ? i : -1));
  const charts = [h('div', {}), h('div', {})];
  put(nodes.out, h('div', { className: 'head-row' }, h('p', { className: 'lead' }, answer.title),
    answer.parts && h('p', { className: 'muted' }, partsLine(answer.parts))), tiles(row, answer), h('div', { className: 'charts' }, charts), advice(answer));
  chart(charts[0], { title: 'Latency', mark: row.size, y: { label: 'one message, µs; band: uncertainty', format: micros }, series: predictionSeries(answer, 'microseconds') });
  chart(charts[1], { title: 'Bandwidth', mark: row.size, y: { label: 'stream of messages, GB/s; band: uncertainty', format: v => `${num(v)} GB/s` }, series: predictionSeries(answer, 'gbytes_per_s') });
  nodes.out.querySelectorAll('details').forEach((d, i) => { d.open = open.has(i); });
  foundLabels(answer.parts);
}

function foundLabels(parts) {
  if (!parts) return;
  for (const [name, , , found] of CONTROLS) {
    const option = document.querySelector(`.controls select[name="${name}"] option[value=""]`);
    const chosen = expect.values[name];
    if (option && !chosen) option.textContent = `as found: ${found(parts) ?? 'unknown'}`;
  }
  for (const [name] of SLIDERS) {
    const input = document.querySelector(`.controls input[name="${name}"]`);
    if (input && !expect.values[name]) input.previousSibling.querySelector('output').textContent = `as found: ${parts[name]}`;
  }
}

const partsLine = p => [`${p.rails > 1 ? `${p.rails} x ` : ''}${linkName(p.link)}`, `MTU ${p.mtu}`, `adapter ${slotName(p.nic)}`, p.gpu && `GPU ${slotName(p.gpu)}`,
  p.memory === 'gpu' ? p.distance : 'host memory', p.relaxed_ordering ? null : 'strict ordering'].filter(Boolean).join(', ');

function tiles(row, answer) {
  const { direct, staged } = row;
  const tile = (name, e, cls) => h('div', { className: `tile ${cls}` }, h('h3', {}, name),
    e ? [h('p', { className: 'big' }, micros(e.microseconds.expected), h('small', {}, ` ${num(e.microseconds.low)} to ${num(e.microseconds.high)}`)),
      h('p', { className: 'big' }, `${num(e.gbytes_per_s.expected)} GB/s`, h('small', {}, ` ${num(e.gbytes_per_s.low)} to ${num(e.gbytes_per_s.high)}`)),
      h('p', { className: 'muted' }, `Message limited by: ${factor(e.binds)}. Stream: ${factor(e.stream_binds)}.`), shares(e)]
      : h('p', {}, row.not_predicted ? `Not predicted: ${row.not_predicted}` : row.not_direct ? `Not direct: ${row.not_direct}` : 'Not applicable.'));
  const gain = direct && staged && staged.microseconds.expected / direct.microseconds.expected;
  const streamGain = direct && staged && direct.gbytes_per_s.expected / staged.gbytes_per_s.expected;
  return h('div', { className: 'tiles', 'aria-live': 'polite' },
    tile(staged ? `Direct, ${size(row.size)}` : size(row.size), direct, 'k-direct'), staged && tile(`Staged, ${size(row.size)}`, staged, 'k-staged'),
    gain ? h('div', { className: 'tile' }, h('h3', {}, 'Direct against staged'),
      h('p', { className: 'big' }, `${num(Math.max(gain, 1 / gain))} x`, h('small', {}, gain >= 1 ? ' lower latency' : ' higher latency')),
      h('p', { className: 'big' }, `${num(Math.max(streamGain, 1 / streamGain))} x`, h('small', {}, streamGain >= 1 ? ' higher bandwidth' : ' lower bandwidth')),
      h('p', { className: 'muted' }, ranges(answer))) : null);
}

function shares(e) {
  if (!e.shares || !e.shares.length) return null;
  const total = e.shares.reduce((sum, x) => sum + x.microseconds, 0) || 1;
  let x = 0;
  const bars = e.shares.map((part, i) => {
    const w = part.microseconds / total * 300;
    const bar = s('rect', { class: `share n${Math.min(i, 4)}`, x, y: 0, width: Math.max(0, w - 1), height: 10 }, s('title', {}, `${factor(part.factor)}: ${micros(part.microseconds)}`));
    x += w;
    return bar;
  });
  const label = e.shares.map(p => `${factor(p.factor)} ${Math.round(p.microseconds / total * 100)} %`);
  return h('div', { className: 'shares' }, s('svg', { viewBox: '0 0 300 10', preserveAspectRatio: 'none', role: 'img', 'aria-label': `Time of one message: ${label.join(', ')}` }, bars),
    h('ul', {}, e.shares.slice(0, 3).map((p, i) => h('li', {}, h('span', { className: `dotmark n${i}` }), label[i]))));
}

function ranges(answer) {
  const range = answer.staged_wins_from ? `From ${size(answer.staged_wins_from)} on, pipelined staging is faster.` : answer.rows.some(r => r.staged) ? 'Direct is faster at every size.' : null;
  const twice = answer.twice_as_fast_below ? `At least twice as fast up to ${size(answer.twice_as_fast_below)}.` : null;
  return [range, twice].filter(Boolean).join(' ');
}

function advice(answer) {
  const assumed = answer.parts ? answer.parts.assumed : [];
  return h('div', { className: 'advice' },
    assumed.length ? h('section', {}, h('h3', {}, 'Assumed'), h('ul', { className: 'plain' }, assumed.map(x => h('li', {}, x)))) : null,
    answer.upgrades.length ? h('section', {}, h('h3', {}, `What a change would bring, at ${size(answer.rows.at(-1).size)}`),
      h('div', { className: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'Changes' }, h('table', {}, h('thead', {}, h('tr', {}, ['Change', 'Kind', 'GB/s now', 'GB/s then'].map((t, i) => h('th', { scope: 'col', className: i > 1 ? 'r' : '' }, t)))),
        h('tbody', {}, answer.upgrades.map(u => h('tr', {}, h('td', {}, u.change), h('td', {}, u.free ? 'setting' : 'hardware'), h('td', { className: 'r' }, num(u.gbytes_before)), h('td', { className: 'r' }, num(u.gbytes_after)))))))) : null);
}

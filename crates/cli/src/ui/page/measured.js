// Tab "Measured": curves of bench --json files, overlaid, with the prediction.
import { api, embedded, field, h, micros, num, put, select } from './util.js';
import { chart } from './chart.js';

const measured = { files: [], predictions: {}, op: 'write', band: 'bandwidth', link: '', memory: '', predict: true, nodes: {} };
const MAX_LINES = 8;

/** The results of a file as lines: {label, op, kind, link, memory, points}. */
function linesOf(file) {
  const j = file.json;
  if (j.schema === 'nobounce-bench/1') {
    const groups = new Map();
    for (const r of j.results || []) {
      const value = r.kind === 'latency' ? r.p50_us : r.gbytes_per_s;
      if (!['latency', 'bandwidth', 'bidirectional'].includes(r.kind) || !(value > 0)) continue;
      const path = (r.path || 'direct').startsWith('staged') ? 'staged' : r.path;
      const label = [r.link === 'shm' ? 'shared memory' : r.link.toUpperCase(), `${r.memory === 'gpu' ? 'GPU' : r.memory} memory`, path, r.qps > 1 && `${r.qps} QPs`].filter(Boolean).join(', ');
      const id = [r.op, r.kind, label].join('|');
      if (!groups.has(id)) groups.set(id, { label, op: r.op, kind: r.kind, link: r.link, memory: r.memory, path, points: [] });
      groups.get(id).points.push([r.size, value]);
    }
    return [...groups.values()];
  }
  if (j.schema === 'nobounce-gpu-initiated/1') {
    return j.links.flatMap(l => {
      const link = l.link === 'auto' ? 'shm' : l.link;
      const line = (op, kind, points) => ({ label: `${link === 'shm' ? 'shared memory' : link.toUpperCase()}, GPU-initiated`, op, kind, link, memory: 'gpu', path: 'direct', points });
      return [line('put', 'latency', l.latency.map(x => [x.bytes, x.p50_us])), line('put', 'bandwidth', l.bandwidth.map(x => [x.bytes, x.put_gbytes_per_s])),
        line('get', 'bandwidth', l.bandwidth.map(x => [x.bytes, x.get_gbytes_per_s]))];
    });
  }
  if (j.schema === 'nobounce-kv/1') {
    return j.links.flatMap(l => ['write', 'read'].map(op => ({ label: `${l.link === 'auto' ? 'shared memory' : l.link.toUpperCase()}, list of pages`, op, kind: 'bandwidth', link: l.link === 'auto' ? 'shm' : l.link,
      memory: 'gpu', path: 'direct', points: l.lists.map(x => [x.page_bytes, x[`${op}_gbytes_per_s`]]) })));
  }
  return [];
}

/** As linesOf, with the name of a file that lacks what its schema says. */
function readLines(file) {
  try { return linesOf(file); } catch { throw new Error(`${file.name} is damaged: it lacks results`); }
}

function addFile(name, json, on = true) {
  const known = ['nobounce-bench/1', 'nobounce-gpu-initiated/1', 'nobounce-kv/1'];
  if (!json || !known.includes(json.schema)) throw new Error(`${name} is not a file of nobounce bench --json (schema: ${json && json.schema || 'none'})`);
  // The same file again replaces it; another file of this name stays apart.
  const same = f => f.json && JSON.stringify(f.json) === JSON.stringify(json);
  let free = name;
  for (let n = 2; measured.files.some(f => f.name === free && !same(f)); n += 1) free = `${name} (${n})`;
  const file = { name: free, json, on };
  file.lines = readLines({ name, json });
  measured.files = measured.files.filter(f => f.name !== free);
  measured.files.push(file);
}

export async function startMeasured(host) {
  const { nodes } = measured;
  nodes.error = h('p', { className: 'error', role: 'alert', hidden: true });
  nodes.list = h('div', { className: 'file-list' });
  nodes.out = h('div', { className: 'results' });
  nodes.filters = h('form', { className: 'filters-row', 'aria-label': 'Curves', onsubmit: e => e.preventDefault() });
  const input = h('input', { type: 'file', accept: '.json,application/json', multiple: true, id: 'bench-file' });
  input.addEventListener('change', () => { openFiles(input.files); input.value = ''; });
  const drop = h('div', { className: 'drop' }, h('label', { htmlFor: 'bench-file' }, 'Open bench files'), input, h('span', { className: 'muted' }, 'or drop them here'));
  for (const type of ['dragover', 'dragenter']) drop.addEventListener(type, e => { e.preventDefault(); drop.classList.add('over'); });
  drop.addEventListener('dragleave', () => drop.classList.remove('over'));
  drop.addEventListener('drop', e => { e.preventDefault(); drop.classList.remove('over'); openFiles(e.dataTransfer.files); });
  put(host, h('div', { className: 'measured-head' }, nodes.list, drop), nodes.error, nodes.filters, nodes.out);
  try {
    if (embedded) for (const f of embedded.bench || []) addFile(f.name, f.json);
    else {
      const { files } = await api('bench');
      for (const [i, f] of files.entries()) measured.files.push({ name: f.name, json: null, lines: [], on: i === 0, info: f });
      await Promise.all(measured.files.filter(f => f.on).map(loadFile));
    }
  } catch (error) { fail(error); }
  render2();
}

async function loadFile(file) {
  if (file.json) return;
  const json = await api('bench/file', { name: file.name });
  file.lines = readLines({ name: file.name, json });
  file.json = json;
}

const fail = error => { measured.nodes.error.textContent = error.message; measured.nodes.error.hidden = false; };

async function openFiles(list) {
  measured.nodes.error.hidden = true;
  for (const blob of list) {
    try {
      let json;
      try { json = JSON.parse(await blob.text()); } catch { throw new Error(`${blob.name} is not JSON`); }
      addFile(blob.name, json);
    } catch (error) { fail(error); }
  }
  render2();
}

const machineText = json => !json.machine ? null : typeof json.machine === 'string' ? json.machine
  : [json.machine.cpu, json.machine.cores && `${json.machine.cores} CPUs`, json.machine.gpu && json.machine.gpu.name, json.machine.kernel && `Linux ${json.machine.kernel}`].filter(Boolean).join(', ');

function render2() {
  const { nodes, files } = measured;
  put(nodes.list, files.length ? files.map(f => {
    const box = h('input', { type: 'checkbox', checked: f.on });
    box.addEventListener('change', async () => {
      f.on = box.checked;
      try { if (f.on) await loadFile(f); } catch (error) { fail(error); }
      render2();
    });
    const j = f.json || f.info || {};
    return h('label', { className: 'file' }, box, h('span', {}, h('b', {}, f.name), h('span', { className: 'muted' },
      [j.started && j.started.replace('T', ' ').replace('Z', ' UTC'), j.machine && machineText(j)].filter(Boolean).join(', '))));
  }) : h('p', { className: 'empty' }, 'No bench files. Make one: ', h('code', {}, 'nobounce bench --json FILE')));
  const all = files.filter(f => f.on).flatMap(f => f.lines.map(l => ({ ...l, file: f })));
  filters(all);
  curves(all);
}

function filters(all) {
  const { nodes } = measured;
  const values = key2 => [...new Set(all.map(l => l[key2]))].sort();
  const pick = (name, label, options) => {
    if (!options.some(([v]) => v === measured[name])) measured[name] = options[0] ? options[0][0] : '';
    const control = select({ name }, options, measured[name]);
    control.addEventListener('change', () => { measured[name] = control.value; curves(all); });
    return field(label, control);
  };
  const ops = values('op').map(o => [o, o.toUpperCase()]).sort((a, b) => (b[0] === 'write') - (a[0] === 'write'));
  const predict = h('input', { type: 'checkbox', name: 'predict', checked: measured.predict });
  predict.addEventListener('change', () => { measured.predict = predict.checked; curves(all); });
  put(nodes.filters, all.length ? [pick('op', 'Operation', ops), pick('band', 'Throughput', [['bandwidth', 'one direction'], ['bidirectional', 'both directions']]),
    pick('link', 'Link', [['', 'all'], ...values('link').map(v => [v, v === 'shm' ? 'shared memory' : v.toUpperCase()])]),
    pick('memory', 'Memory', [['', 'all'], ...values('memory').map(v => [v, `${v === 'gpu' ? 'GPU' : v} memory`])]),
    h('label', { className: 'check' }, predict, 'Prediction for the software NIC')] : []);
}

async function predictionFor(memory) {
  if (embedded) return embedded.predict && embedded.predict.software && embedded.predict.software[memory] || null;
  measured.predictions[memory] ||= api('predict', { software: 'nobounce', memory, size: '8..1G' }).catch(() => null);
  return measured.predictions[memory];
}

async function curves(all) {
  const { nodes, op, link, memory, band } = measured;
  const turn = measured.turn = {};
  const several = measured.files.filter(f => f.on).length > 1;
  const chosen = all.filter(l => l.op === op && (!link || l.link === link) && (!memory || l.memory === memory));
  const memories = [...new Set(chosen.filter(l => l.link === 'udp' && l.memory !== 'stand-in').map(l => l.memory))];
  const guesses = measured.predict && (op === 'write' || op === 'read') ? (await Promise.all(memories.map(async m => [m, await predictionFor(m)]))).filter(g => g[1]) : [];
  if (turn !== measured.turn) return;
  if (!chosen.length) { put(nodes.out, all.length ? h('p', { className: 'empty' }, 'No curve for this choice.') : null); return; }
  const hosts = [h('div', {}), h('div', {})];
  put(nodes.out, h('div', { className: 'charts' }, hosts), notes());
  const build = (kind, unit) => {
    const mine = chosen.filter(l => l.kind === kind);
    const lines = mine.slice(0, MAX_LINES).map((l, i) => ({ name: `${several ? `${l.file.name}: ` : ''}${l.label}`, color: i, dash: l.path === 'direct' ? '' : l.path === 'staged' ? '7 4' : '2 3', marks: true,
      points: [...l.points].sort((a, b) => a[0] - b[0]) }));
    const sizes = mine.flatMap(l => l.points.map(p => p[0])), top = Math.max(...sizes), low = Math.min(...sizes);
    if (kind !== 'bidirectional') for (const [m, guess] of guesses) {
      const points = guess.rows.filter(r => r.direct && r.size <= top && r.size >= low).map(r => { const e = r.direct[unit]; return [r.size, e.expected, e.low, e.high]; });
      if (points.length && mine.length) lines.push({ name: `prediction: UDP, ${m === 'gpu' ? 'GPU' : m} memory, direct`, kind: 'predicted', dash: m === 'gpu' ? '1 4' : '1 4 5 4', points });
    }
    return { lines, left: mine.length - MAX_LINES };
  };
  const latency = build('latency', 'microseconds'), bandwidth = build(band, 'gbytes_per_s');
  chart(hosts[0], { title: `Latency, ${op.toUpperCase()}`, y: { label: 'median of one message, µs', format: micros }, series: latency.lines });
  chart(hosts[1], { title: `Bandwidth, ${op.toUpperCase()}`, y: { label: band === 'bidirectional' ? 'sum of both directions, GB/s' : 'one direction, GB/s', format: v => `${num(v)} GB/s` }, series: bandwidth.lines });
  const left = Math.max(latency.left, bandwidth.left);
  if (left > 0) nodes.out.prepend(h('p', { className: 'note' }, `${left} more curves match. Choose a link or a memory to see them.`));
}

function notes() {
  return h('details', { className: 'data' }, h('summary', {}, 'About these files'), measured.files.filter(f => f.on && f.json).map(f => {
    const j = f.json;
    const rows = [['Command', j.command], ['Machine', machineText(j)], ['GPU paths', j.machine?.gpu?.paths], ['Version', j.version], ['Notes', (j.notes || []).join('; ')],
      ['TCP, for comparison', j.tcp && `${micros(j.tcp.half_round_trip_us)}, ${num(j.tcp.gbytes_per_s)} GB/s`], ['Plain UDP', j.raw && `${micros(j.raw.half_round_trip_us)}, ${num(j.raw.gbytes_per_s)} GB/s`],
      ['Bytes verified', j.results && `${j.results.filter(r => r.verified).length} of ${j.results.length} cases`], ['Faults', j.results && j.results.filter(r => r.fault).map(r => r.fault).join('; ')]];
    return h('section', {}, h('h3', {}, f.name), h('dl', { className: 'facts' }, rows.filter(r => r[1]).map(([k, v]) => [h('dt', {}, k), h('dd', {}, v)])));
  }));
}

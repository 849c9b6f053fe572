// Tab "Machine": the PCI tree, the facts of its devices, the path of the bytes.
import { commandLine, h, s, put, fact, fixList, num, pcie, say, select, size, DISTANCES, PATHS } from './util.js';
import { bytePath, layout, nvlinkOf, treeModel } from './tree.js';

const state = { data: null, gpu: null, nic: null, focus: null };
let machineHost = null, drawing = null, lastLayout = null;

const shortName = name => name.replace(/^(NVIDIA|AMD|Intel)\s+/, '');
const yes = value => value === undefined || value === null ? null : value === true ? 'yes' : value === false ? 'no' : String(value);

function indexFacts(data) {
  const by = list => new Map((fact(list) || []).map(x => [x.address, x]));
  data.index = { pci: by(data.facts.pci), gpus: by(data.facts.gpus), nics: by(data.facts.nics) };
  data.verdictOf = (gpu, nic) => data.doctor.verdicts.find(v => v.gpu === gpu && v.nic === nic);
  data.nicName = address => (data.index.nics.get(address) || {}).name;
  data.nicAddress = name => [...data.index.nics.values()].find(n => n.name === name)?.address;
}

/** Shows a machine: {name, doctor, facts, topo}. */
export function showMachine(host, data) {
  machineHost = host;
  indexFacts(data);
  state.data = data;
  state.focus = null;
  const gpus = [...data.index.gpus.values()], nics = [...data.index.nics.values()];
  const verdicts = data.doctor.verdicts;
  const worst = ['staged', 'slow'].map(p => verdicts.find(v => v.best && v.path === p)).find(Boolean);
  const first = worst || verdicts.find(v => v.best) || verdicts[0];
  state.gpu = first ? first.gpu : gpus[0]?.address ?? null;
  state.nic = first ? data.nicAddress(first.nic) : nics[0]?.address ?? null;
  drawing = h('div', { className: 'tree' });
  const panel = h('aside', { className: 'panel', 'aria-label': 'Path of the bytes' });
  put(host, summary(data),
    h('div', { className: 'machine' },
      h('section', { className: 'map' }, h('h2', {}, 'PCI tree'), drawing, key(data)), panel, matrix(data)));
  new ResizeObserver(() => { if (drawing.clientWidth && drawing.dataset.width !== String(drawing.clientWidth)) draw(); }).observe(drawing);
  draw();
  renderPanel();
}

function summary(data) {
  const { facts, doctor, topo } = data;
  const gpus = fact(facts.gpus) || [], nics = fact(facts.nics) || [];
  const best = doctor.verdicts.filter(v => v.best), tally = {};
  for (const v of best) tally[v.path] = (tally[v.path] || 0) + 1;
  const kinds = list => Object.entries(list.reduce((m, x) => ({ ...m, [x]: (m[x] || 0) + 1 }), {})).map(([k, n]) => `${n} x ${k}`).join(', ');
  const rates = nics.map(n => { const p = (fact(n.ports) || [])[0]; return p ? `${fact(p.rate_gbps) ?? '?'} Gb/s` : 'no port'; });
  const item = (name, value) => value && h('div', {}, h('dt', {}, name), h('dd', {}, value));
  return h('dl', { className: 'facts-line' },
    item('Machine', fact(topo.product) || fact(facts.machine.product) || facts.host || 'unknown'),
    item('Processor', [facts.machine.sockets > 1 && `${facts.machine.sockets} x `, fact(facts.machine.cpu)?.name || facts.machine.arch]
      .filter(Boolean).join('')),
    item('GPUs', gpus.length ? kinds(gpus.map(g => shortName(g.name || 'GPU'))) : 'none'),
    item('RDMA adapters', nics.length ? kinds(rates) : 'none'),
    item('Each GPU with its best adapter', best.length
      ? h('span', { className: 'tally' }, ['direct', 'slow', 'staged', 'unknown'].filter(p => tally[p]).map(p =>
        h('span', { className: `badge p-${p}` }, `${tally[p]} ${PATHS[p].toLowerCase()}`)))
      : 'no pair'));
}

function key(data) {
  const line = (cls, text) => h('li', {}, s('svg', { width: 26, height: 10, 'aria-hidden': 'true' },
    s('line', { class: cls, x1: 1, x2: 25, y1: 5, y2: 5 })), text);
  const { joined, linked } = nvlinkOf(fact(data.facts.gpus) || []);
  return h('ul', { className: 'legend key' }, line('wire', 'PCIe'), joined && line('nvlink', 'NVLink'),
    linked.size > 0 && !joined && h('li', {}, 'NVLink is not drawn: which GPUs it joins is unknown'),
    data.topo.nodes.length > 1 && line('socket', 'link between sockets'),
    line('bytes p-direct', 'path: direct'), line('bytes p-slow', 'direct, but slow'), line('bytes p-staged', 'staged through host memory'));
}

const ruler = document.createElement('canvas').getContext('2d');
/** The text, or as many of its words as fit. */
function clip(text, room, font, keepEnd) {
  ruler.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
  const fits = t => ruler.measureText(t).width <= room;
  if (fits(text)) return text;
  const words = text.split(' ');
  while (words.length > 1) { words.pop(); if (fits(words.join(' '))) return words.join(' '); }
  if (keepEnd) {
    let tail = text;
    while (tail.length > 1 && !fits(`…${tail}`)) tail = tail.slice(1);
    return `…${tail}`;
  }
  let cut = words[0];
  while (cut.length > 1 && !fits(`${cut}…`)) cut = cut.slice(0, -1);
  return `${cut}…`;
}

function labels(box) {
  const { data } = state;
  if (box.kind === 'cpu') {
    const match = /socket (\d+)/.exec(box.node.label);
    return [match ? `CPU socket ${match[1]}` : 'CPU', box.node.notes[0] || ''];
  }
  if (box.kind === 'memory') return ['Host memory', 'DRAM'];
  if (box.kind === 'gpu') {
    const [, index, name] = /^GPU (\d+): (.*)$/.exec(box.branch.label) || [null, '', box.branch.label];
    return [index === '' ? 'GPU' : `GPU ${index}`, shortName(name)];
  }
  if (box.kind === 'nic') return [box.branch.label, box.branch.down ? 'port down' : box.branch.notes[0] || ''];
  if (box.kind === 'nvme') return ['NVMe', box.branch.address.replace(/^0000:/, '')];
  if (box.kind === 'switch') return [box.w < 130 ? 'Switch' : 'PCIe switch', box.branch.address.replace(/^0000:/, '')];
  return ['Root bus', box.branch.address.replace(/^pci(0000:)?/, '')];
}

/** Facts of a box as [name, value] pairs. */
function factsOf(box) {
  const { data } = state, rows = [];
  const add = (name, value) => { if (value !== undefined && value !== null && value !== '') rows.push([name, value]); };
  if (box.kind === 'cpu' || box.kind === 'memory') {
    const cpu = fact(data.facts.machine.cpu);
    add('NUMA node', box.node.label);
    if (cpu) add('Processor', cpu.name);
    box.node.notes.forEach(note => add('', note));
    if (box.kind === 'memory') add('Use', 'staged bytes are copied to it');
    return rows;
  }
  const { address } = box.branch;
  const pci = data.index.pci.get(address) || {}, gpu = data.index.gpus.get(address), nic = data.index.nics.get(address);
  add('PCI address', address);
  if (gpu) {
    add('Model', gpu.name);
    add('Memory', fact(gpu.memory_bytes) && size(gpu.memory_bytes));
    add('BAR1', fact(gpu.bar1_bytes) && size(gpu.bar1_bytes));
    add('dma-buf export', yes(fact(gpu.dma_buf)));
    add('GPUDirect RDMA', yes(fact(gpu.gpudirect_rdma)));
    add('BAR1 window', gpu.window_probe && (gpu.window_probe.ok ? gpu.window_probe.detail : `no: ${gpu.window_probe.detail || 'unknown reason'}`));
    if (gpu.nvlinks > 0) add('NVLink', `${gpu.nvlinks} links`);
    if (gpu.coherent_link) add('Coherent with the CPU', 'yes');
    if (gpu.mig === true) add('MIG', 'on');
    if (gpu.confidential === true) add('Confidential computing', 'on');
  }
  if (nic) {
    add('Driver', [nic.driver, fact(nic.firmware) && `firmware ${nic.firmware}`].filter(Boolean).join(', '));
    for (const port of fact(nic.ports) || []) {
      add(`Port ${port.number}`, [`${fact(port.rate_gbps) ?? '?'} Gb/s`, port.link_layer, port.state, port.active_mtu && `MTU ${port.active_mtu}`].filter(Boolean).join(', '));
    }
  }
  const link = box.branch.link || (box.port && box.port.link);
  if (link) add('PCIe', box.branch.degraded ? `${pcie(link)}, capable of ${pcie(link, 'max_')}` : pcie(link));
  add('NUMA node', pci.numa_node >= 0 ? pci.numa_node : null);
  const config = fact(pci.config) || {};
  add('MaxPayload', fact(config.max_payload) && `${config.max_payload} B`);
  if (nic) add('MaxReadReq', fact(config.max_read_request) && `${config.max_read_request} B`);
  if (nic) add('Relaxed ordering', yes(fact(config.relaxed_ordering)));
  add('IOMMU', fact(pci.iommu)?.kind);
  if (pci.driver && !nic) add('Driver', pci.driver);
  for (const f of data.doctor.findings) {
    if (f.severity !== 'info' && f.devices.some(d => d === address || (nic && d === nic.name))) add('Finding', f.title);
  }
  return rows;
}

function draw() {
  const { data } = state;
  const width = drawing.clientWidth || 900;
  drawing.dataset.width = String(width);
  const gpus = fact(data.facts.gpus) || [];
  const { joined, links } = nvlinkOf(gpus);
  const model = treeModel(data.topo);
  if (!model.length || !model.some(m => m.lanes.length)) {
    put(drawing, h('p', { className: 'empty' }, 'No GPU, RDMA adapter or NVMe drive on the PCI bus. ',
      'The software NIC works without them. Choose a known machine above to see one.'));
    lastLayout = null;
    return;
  }
  const out = lastLayout = layout(model, width, joined);
  const poly = (points, cls) => s('polyline', { class: cls, points: points.map(p => p.join(',')).join(' ') });
  const root = s('svg', { class: 'tree-svg', width, height: out.height, viewBox: `0 0 ${width} ${out.height}`, role: 'group',
    'aria-label': 'PCI tree. Arrow keys move between devices, Enter chooses a GPU or an adapter.' });
  for (const n of out.numa) {
    root.append(s('rect', { class: 'numa', x: n.x + 0.5, y: n.y + 0.5, width: n.w - 1, height: n.h - 1, rx: 6 }),
      s('text', { class: 'numa-label', x: n.x + 10, y: n.y + 16 }, `NUMA node ${/node (\d+)/.exec(n.label)?.[1] ?? n.index}`));
  }
  for (const link of out.sockets) root.append(poly(link.points, 'socket'));
  for (const stub of out.stubs) root.append(poly(stub, 'nvlink'));
  for (const bar of out.bars) {
    root.append(s('rect', { class: 'nvbar', x: bar.x, y: bar.y, width: bar.w, height: bar.h, rx: 3 }),
      s('text', { class: 'nvtext', x: bar.x + bar.w / 2, y: bar.y + 14, 'text-anchor': 'middle' },
        bar.w > 190 ? `NVLink, ${links} links per GPU` : `NVLink x${links}`));
  }
  const boxes = [...out.boxes.values()];
  for (const box of boxes) {
    if (box.conn) root.append(poly(box.conn, box.branch.degraded ? 'wire degraded' : 'wire'));
    if (box.kind === 'memory') root.append(poly([[box.x, box.cy], [box.x - 22, box.cy]], 'wire'));
  }
  root.append(s('g', { class: 'path-layer' }));
  for (const box of boxes) root.append(drawBox(box));
  put(drawing, root, h('div', { className: 'card', hidden: true }));
  rove(root);
  drawPath();
}

function drawBox(box) {
  const [a, b] = labels(box);
  const choose = box.kind === 'gpu' || box.kind === 'nic';
  const link = box.branch && box.branch.link;
  const bad = box.branch && (box.branch.degraded || box.branch.down);
  const lineHeads = box.kind === 'switch' && box.h < 30;
  const room = box.w - (box.w < 90 || box.kind === 'memory' ? 13 : 18) - (box.kind === 'switch' ? 6 : 0);
  const second = box.branch?.degraded ? (link.width < link.max_width ? `x${link.width} of x${link.max_width}` : `${pcie(link).split(' ')[0]} slot`) : b;
  const hub = !choose && !lineHeads && !lastLayout.narrow && (box.kind === 'switch' || box.kind === 'root') ? 12 : 0;
  const tall = box.h > 44;
  const node = s('g', {
    class: `box b-${box.kind}${bad ? ' bad' : ''}`, 'data-id': box.id, tabindex: -1, role: choose ? 'button' : 'img',
    'aria-label': [a, second, box.branch?.address, bad ? 'has a problem' : ''].filter(Boolean).join(', '),
  },
  s('rect', { x: box.x + 0.5, y: box.y + 0.5, width: box.w - 1, height: box.h - 1, rx: 4 }),
  s('text', { class: 'name', x: box.x + 7 + hub, y: lineHeads ? box.y + 17 : tall ? box.cy - 2 : box.y + 15 }, clip(a, room - hub, '650 12px', box.kind === 'nic')),
  !lineHeads && s('text', { class: 'sub', x: box.x + 7 + hub, y: tall ? box.cy + 12 : box.y + 28 }, clip(second, room - hub - (bad && tall ? 12 : 0), '10.5px')),
  bad && s('text', { class: 'bad-mark', x: box.x + box.w - 8, y: box.y + 15, 'text-anchor': 'end' }, '!'));
  const speed = box.kind === 'switch' && !lineHeads && pcie(link);
  if (speed && !lastLayout.narrow && box.w > 90) node.append(s('text', { class: 'speed', x: box.cx - 5, y: box.y - 4, 'text-anchor': 'end' }, speed));
  const show = () => showCard(box);
  node.addEventListener('pointerenter', show);
  node.addEventListener('focus', () => { state.focus = box.id; show(); });
  node.addEventListener('pointerleave', hideCard);
  node.addEventListener('blur', hideCard);
  node.addEventListener('click', () => { node.focus(); show(); if (choose) choosePair(box); });
  node.addEventListener('keydown', event => {
    if ((event.key === 'Enter' || event.key === ' ') && choose) { event.preventDefault(); choosePair(box); }
    if (event.key === 'Escape') hideCard();
  });
  return node;
}

function rove(root) {
  const nodes = [...root.querySelectorAll('.box')];
  const start = nodes.find(n => n.dataset.id === state.focus) || nodes[0];
  if (start) start.setAttribute('tabindex', 0);
  root.addEventListener('keydown', event => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const at = nodes.indexOf(document.activeElement);
    if (at < 0 || !(step || event.key === 'Home' || event.key === 'End')) return;
    event.preventDefault();
    const to = event.key === 'Home' ? 0 : event.key === 'End' ? nodes.length - 1 : (at + step + nodes.length) % nodes.length;
    nodes[at].setAttribute('tabindex', -1);
    nodes[to].setAttribute('tabindex', 0);
    nodes[to].focus();
  });
}

function showCard(box) {
  const card = drawing.querySelector('.card');
  put(card, h('strong', {}, labels(box)[0]), h('dl', {}, factsOf(box).map(([name, value]) => [h('dt', {}, name), h('dd', {}, String(value))])));
  card.hidden = false;
  const room = drawing.clientWidth, w = card.offsetWidth, tall = card.offsetHeight;
  const left = Math.min(Math.max(0, box.cx - w / 2), Math.max(0, room - w));
  const below = box.y + Math.min(box.h, 80) + 8;
  const fitsBelow = drawing.getBoundingClientRect().top + below + tall < window.innerHeight;
  card.style.left = `${left}px`;
  card.style.top = `${fitsBelow || box.y < tall ? below : box.y - tall - 8}px`;
}
document.addEventListener('pointerdown', event => { if (drawing && !event.target.closest('.box')) hideCard(); });
const hideCard = () => { const card = drawing.querySelector('.card'); if (card) card.hidden = true; };

function choosePair(box) {
  state[box.kind] = box.id;
  update();
}
function update() {
  drawPath();
  renderPanel();
  const v = state.data.verdictOf(state.gpu, state.data.nicName(state.nic));
  if (v) say(`GPU ${v.gpu_index ?? v.gpu} and ${v.nic}: ${PATHS[v.path]}`);
}

function findingsFor(verdict) {
  const { findings } = state.data.doctor;
  const concerns = f => f.effect !== 'nothing' && f.devices.some(d => d === verdict.gpu || d === verdict.nic);
  const known = verdict.reasons.map(reason => ({ reason, finding: findings.find(f => f.title === reason)
    || findings.find(f => concerns(f) && f.title.endsWith(reason)) }));
  return known;
}

function drawPath() {
  if (!lastLayout) return;
  const root = drawing.querySelector('.tree-svg'), layer = root.querySelector('.path-layer');
  put(layer);
  const nicName = state.data.nicName(state.nic), verdict = state.data.verdictOf(state.gpu, nicName);
  for (const node of root.querySelectorAll('.box')) {
    const chosen = node.dataset.id === state.gpu || node.dataset.id === state.nic;
    node.classList.toggle('chosen', chosen);
    node.classList.remove('on-path', 'p-direct', 'p-slow', 'p-staged', 'p-unknown');
    if (node.getAttribute('role') === 'button') node.setAttribute('aria-pressed', chosen);
  }
  if (!verdict) return;
  const viaCpu = findingsFor(verdict).some(r => r.finding && r.finding.id === 'acs-redirect');
  const { legs, hubs } = bytePath(lastLayout, state.gpu, state.nic, verdict.path === 'staged', viaCpu);
  for (const id of [...hubs, state.gpu, state.nic]) {
    root.querySelector(`.box[data-id="${CSS.escape(id)}"]`)?.classList.add('on-path', `p-${verdict.path}`);
  }
  for (const leg of legs) {
    const d = roundedPath(leg);
    const [x, y] = leg.at(-1), [px, py] = leg.at(-2);
    const angle = Math.atan2(y - py, x - px) * 180 / Math.PI;
    layer.append(s('path', { class: `bytes p-${verdict.path}`, d }), s('path', { class: `flow p-${verdict.path}`, d }),
      s('path', { class: `arrow p-${verdict.path}`, d: 'M0,0 L-9,-5 L-9,5 Z', transform: `translate(${x} ${y}) rotate(${angle})` }));
  }
}

function roundedPath(points) {
  const clean = points.filter((p, i) => !i || Math.hypot(p[0] - points[i - 1][0], p[1] - points[i - 1][1]) > 0.5);
  let d = `M${clean[0].join(',')}`;
  for (let i = 1; i < clean.length; i += 1) {
    const p = clean[i], prev = clean[i - 1], next = clean[i + 1];
    if (!next) { d += ` L${p.join(',')}`; break; }
    const r = Math.min(4, Math.hypot(p[0] - prev[0], p[1] - prev[1]) / 2, Math.hypot(next[0] - p[0], next[1] - p[1]) / 2);
    const toward = (a, b) => { const l = Math.hypot(b[0] - a[0], b[1] - a[1]) || 1; return [a[0] + (b[0] - a[0]) / l * r, a[1] + (b[1] - a[1]) / l * r]; };
    d += ` L${toward(p, prev).join(',')} Q${p.join(',')} ${toward(p, next).join(',')}`;
  }
  return d;
}

function renderPanel() {
  const { data } = state, panel = machineHost.querySelector('.panel');
  const gpus = [...data.index.gpus.values()], nics = [...data.index.nics.values()];
  if (!gpus.length || !nics.length) {
    put(panel, h('h2', {}, 'Path of the bytes'), h('p', {}, gpus.length ? 'This machine has no RDMA adapter. ' : 'This machine has no GPU. ',
      'A path needs a GPU and an adapter.'), h('p', {}, 'The software NIC gives programs RDMA without an adapter:'), commandLine('nobounce run -- PROGRAM'));
    return;
  }
  const pick = (list, value, label, kind, text) => {
    const control = select({ id: `pick-${kind}` }, list.map(x => [x.address, text(x)]), value);
    control.addEventListener('change', () => { state[kind] = control.value; update(); machineHost.querySelector(`#pick-${kind}`).focus(); });
    return h('label', { className: 'field' }, h('span', { className: 'field-name' }, label), control);
  };
  const nicName = data.nicName(state.nic), v = data.verdictOf(state.gpu, nicName);
  const bestFor = data.doctor.verdicts.find(x => x.gpu === state.gpu && x.best);
  put(panel, h('h2', {}, 'Path of the bytes'),
    h('div', { className: 'pair' },
      pick(gpus, state.gpu, 'GPU', 'gpu', g => `GPU ${g.index ?? ''} ${shortName(g.name || g.address)}`),
      pick(nics, state.nic, 'Adapter', 'nic', n => `${n.name}${bestFor && bestFor.nic === n.name ? ' (best for this GPU)' : ''}`)),
    v ? verdictView(v) : h('p', {}, 'The doctor has no verdict for this pair.'));
}

function verdictView(v) {
  const reasons = findingsFor(v);
  const text = { direct: 'The adapter reads and writes GPU memory. Host memory takes no part.',
    slow: 'The adapter reaches GPU memory, below the possible rate.',
    staged: 'The adapter cannot reach GPU memory. Bytes are copied through host buffers.',
    unknown: 'The doctor could not decide whether this pair is direct.' }[v.path];
  const library = (name, x) => x && [h('dt', {}, name), h('dd', {}, h('span', { className: `word w-${x.kind}` }, x.kind), x.text ? `: ${x.text}` : '')];
  return h('div', { className: 'verdict' },
    h('p', {}, h('span', { className: `badge big p-${v.path}` }, PATHS[v.path]), v.by && ` by ${v.by}`, v.proven && ', proven by a registration'),
    h('p', {}, text),
    h('dl', { className: 'facts' },
      h('dt', {}, 'Distance'), h('dd', {}, v.distance ? `${v.distance}: ${DISTANCES[v.distance] || ''}` : 'unknown'),
      v.expected_gbs ? [h('dt', {}, 'Expected'), h('dd', {}, `${num(v.expected_gbs)} GB/s`)] : null,
      v.possible_gbs && v.possible_gbs > v.expected_gbs * 1.01 ? [h('dt', {}, 'Possible'), h('dd', {}, `${num(v.possible_gbs)} GB/s without the findings`)] : null,
      library('NCCL', v.nccl), library('UCX', v.ucx)),
    reasons.length ? [h('h3', {}, reasons.length > 1 ? 'Reasons' : 'Reason'),
      reasons.map(({ reason, finding }) => h('div', { className: 'reason' },
        h('p', {}, h('b', {}, reason)), finding && h('p', { className: 'muted' }, finding.why),
        finding && finding.fix_parts.length ? [h('h4', {}, 'Fix'), fixList(finding.fix_parts)] : null))] : null);
}

function matrix(data) {
  const rows = [...data.index.gpus.values()], columns = [...data.index.nics.values()];
  if (!rows.length || !columns.length) return null;
  const look = new Map(data.doctor.verdicts.map(v => [`${v.gpu} ${v.nic}`, v]));
  return h('section', { className: 'pairs' }, h('h2', {}, 'All pairs'),
    h('p', { className: 'muted' }, 'Distance of every GPU and adapter. Outlined: the best adapter for the GPU.'),
    h('div', { className: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'All pairs' }, h('table', { className: 'matrix' },
      h('thead', {}, h('tr', {}, h('td', {}), columns.map(n => h('th', { scope: 'col' }, n.name)))),
      h('tbody', {}, rows.map(g => h('tr', {}, h('th', { scope: 'row' }, `GPU ${g.index ?? g.address}`),
        columns.map(n => {
          const v = look.get(`${g.address} ${n.name}`);
          if (!v) return h('td', {}, '-');
          return h('td', {}, h('button', { type: 'button', className: `cell p-${v.path}${v.best ? ' best' : ''}`,
            'aria-label': `GPU ${g.index ?? g.address}, ${n.name}: ${v.distance || 'distance unknown'}, ${PATHS[v.path]}${v.best ? ', best' : ''}`,
            onclick: () => { state.gpu = g.address; state.nic = n.address; update(); machineHost.querySelector('.machine').scrollIntoView({ block: 'nearest' }); } },
          v.distance || '?', v.path === 'staged' ? ' S' : v.path === 'slow' ? ' !' : ''));
        })))))),
    h('ul', { className: 'legend' }, ['direct', 'slow', 'staged'].map(p => h('li', {}, h('span', { className: `cell p-${p}` }, { direct: 'PIX', slow: 'PIX !', staged: 'PIX S' }[p]), PATHS[p].toLowerCase()))));
}

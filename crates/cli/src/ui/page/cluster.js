// The cluster view: time and money that GPUDirect saves per step of a collective.
import { api, embedded, factor, field, h, millis, num, put, s, select } from './util.js';

const PATTERNS = { 'ring-all-reduce': 'All-reduce, ring', 'tree-all-reduce': 'All-reduce, tree', 'all-gather': 'All-gather',
  'reduce-scatter': 'Reduce-scatter', 'all-to-all': 'All-to-all', 'kv-hand-over': 'KV hand-over' };
const clusterState = { values: { nodes: 8, 'gpus-per-node': 8, 'nics-per-node': 8, parameters: 7, width: '2', bytes: '', unit: 'G', compute: 400, overlap: 0 }, price: 2.5, pattern: 'ring-all-reduce', answer: null, busy: null };

const UNITS = { M: 2 ** 20, G: 2 ** 30 };
const WIDTHS = [['4', '4 B (FP32)'], ['2', '2 B (BF16, FP16)'], ['1', '1 B (FP8)']];
/** Gradients, or weights: one value for each parameter. */
const modelBytes = values => values.parameters * 1e9 * values.width;

export function clusterView(host, parts) {
  const out = h('div', { className: 'cluster-out' }), error = h('p', { className: 'error', role: 'alert', hidden: true });
  const report = !!embedded;
  const values = clusterState.values;
  if (report && embedded.impact) {
    const c = embedded.impact.cluster;
    Object.assign(values, { nodes: c.nodes, 'gpus-per-node': c.gpus_per_node, 'nics-per-node': c.nics_per_node, parameters: Number((c.bytes / 2e9).toPrecision(4)), compute: c.compute_ms, overlap: c.overlap * 100 });
    clusterState.price = c.price || clusterState.price;
  }
  let timer;
  const soon = () => { clearTimeout(timer); timer = setTimeout(load, 150); };
  const number = (name, label, props) => {
    const input = h('input', { type: 'number', name, disabled: report, inputMode: 'decimal', ...props });
    input.value = values[name];
    input.addEventListener('input', () => {
      if (!input.checkValidity() || input.value === '' && name !== 'bytes') return;
      values[name] = input.value === '' ? '' : Number(input.value);
      follow();
      soon();
    });
    return field(label, input);
  };
  const unit = select({ name: 'unit', disabled: report, 'aria-label': 'Unit' }, [['M', 'MiB'], ['G', 'GiB']], values.unit);
  unit.addEventListener('change', () => { values.unit = unit.value; follow(); soon(); });
  const width = select({ name: 'width', disabled: report }, WIDTHS, values.width);
  width.addEventListener('change', () => { values.width = width.value; follow(); soon(); });
  const overlapText = h('output', {}, `${values.overlap} %`);
  const overlap = h('input', { type: 'range', name: 'overlap', min: 0, max: 100, step: 5, disabled: report });
  overlap.value = values.overlap;
  overlap.addEventListener('input', () => { values.overlap = Number(overlap.value); overlapText.textContent = `${overlap.value} %`; soon(); });
  const price = h('input', { type: 'number', name: 'price', min: 0, step: 0.1, inputMode: 'decimal' });
  price.value = clusterState.price;
  price.addEventListener('input', () => { if (price.checkValidity()) { clusterState.price = Number(price.value) || 0; render(out); } });
  const pattern = select({ name: 'pattern' }, Object.entries(PATTERNS), clusterState.pattern);
  pattern.addEventListener('change', () => { clusterState.pattern = pattern.value; render(out); });
  const size2 = number('bytes', 'Bytes per step, if others', { min: 0.001, step: 'any' });
  /** The empty field shows the bytes that follow from the model. */
  const follow = () => { size2.querySelector('input').placeholder = Number((modelBytes(values) / UNITS[values.unit]).toPrecision(4)); };
  size2.append(unit);
  size2.classList.add('with-unit');
  follow();
  put(host, h('h2', {}, 'In a cluster'), h('div', { className: 'calc' },
    h('form', { className: 'controls', 'aria-label': 'Cluster', onsubmit: e => e.preventDefault() }, field('Collective', pattern), number('nodes', 'Machines', { min: 2, max: 100000, step: 1 }),
      number('gpus-per-node', 'GPUs per machine', { min: 1, max: 64, step: 1 }), number('nics-per-node', 'Adapters per machine', { min: 1, max: 64, step: 1 }),
      number('parameters', 'Model size, billion parameters', { min: 0.000001, step: 'any' }), field('Exchanged for each parameter', width), size2, number('compute', 'Compute time of a step, ms', { min: 0, step: 'any' }), field(['Overlap of exchange and compute ', overlapText], overlap), field('Price of a GPU-hour', price),
      report && h('p', { className: 'note' }, 'This report holds one cluster. To change it, run nobounce ui.')),
    h('div', { className: 'results' }, error, out)));
  async function load() {
    if (report) {
      clusterState.answer = embedded.impact || null;
      if (clusterState.answer) render(out); else put(out, h('p', { className: 'empty' }, 'This report holds no cluster.'));
      return;
    }
    clusterState.busy?.abort();
    const busy = clusterState.busy = new AbortController();
    try {
      clusterState.answer = await api('predict', { ...parts(), memory: '', nodes: values.nodes, 'gpus-per-node': values['gpus-per-node'],
        'nics-per-node': values['nics-per-node'], bytes: String(Math.round(values.bytes === '' ? modelBytes(values) : values.bytes * UNITS[values.unit])),
        compute: values.compute, overlap: values.overlap / 100 }, busy.signal);
      error.hidden = true;
      render(out);
    } catch (problem) {
      if (problem.name === 'AbortError') return;
      error.textContent = problem.message;
      error.hidden = false;
    }
  }
  document.addEventListener('parts-changed', soon);
  load();
}

const whole = value => Math.round(value).toLocaleString('en-US').replaceAll(',', '\u202f');

function render(out) {
  const { answer, price, pattern } = clusterState;
  if (!answer) return;
  if (answer.not_predicted || answer.not_direct) {
    put(out, h('p', { className: 'lead' }, answer.title), h('p', {}, answer.not_predicted ? `Not predicted: ${answer.not_predicted}` : `Not direct: ${answer.not_direct}`));
    return;
  }
  const rows = answer.impact, chosen = rows.find(r => r.pattern === pattern) || rows[0];
  const longest = Math.max(...rows.map(r => r.staged ? r.staged.step_ms : r.direct.step_ms));
  const saved = r => r.staged ? r.staged.step_ms - r.direct.step_ms : 0;
  const bar = r => {
    const w = v => v / longest * 200;
    const compute = answer.cluster.compute_ms;
    const one = (e, y, cls) => e ? [s('rect', { class: 'bar compute', x: 0, y, width: w(Math.min(compute, e.step_ms)), height: 7 }),
      s('rect', { class: `bar ${cls}`, x: w(Math.min(compute, e.step_ms)), y, width: w(Math.max(0, e.step_ms - compute)), height: 7 })] : [];
    return s('svg', { class: 'bars', viewBox: '0 0 200 18', preserveAspectRatio: 'none', 'aria-hidden': 'true' }, one(r.direct, 1, 'k-direct'), one(r.staged, 10, 'k-staged'));
  };
  put(out, h('p', { className: 'lead' }, answer.title),
    h('div', { className: 'tiles', 'aria-live': 'polite' },
      h('div', { className: 'tile k-direct' }, h('h3', {}, 'Step, direct'), h('p', { className: 'big' }, millis(chosen.direct.step_ms)), h('p', { className: 'muted' }, `Exchange limited by: ${factor(chosen.direct.binds)}`)),
      chosen.staged && h('div', { className: 'tile k-staged' }, h('h3', {}, 'Step, staged'), h('p', { className: 'big' }, millis(chosen.staged.step_ms)), h('p', { className: 'muted' }, `Exchange limited by: ${factor(chosen.staged.binds)}`)),
      h('div', { className: 'tile' }, h('h3', {}, 'Saved by direct'), h('p', { className: 'big' }, millis(saved(chosen)), h('small', {}, ` per step, ${num(saved(chosen) / (chosen.staged || chosen.direct).step_ms * 100)} %`)),
        h('p', { className: 'big' }, whole(chosen.gpu_hours * price), h('small', {}, ` per month: ${whole(chosen.gpu_hours)} GPU-hours`)))),
    h('div', { className: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'All collectives' }, h('table', { className: 'impact' },
      h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'Collective'), h('th', { scope: 'col', className: 'wide-only' }, 'Step: compute, then exchange'),
        ['Direct', 'Staged', 'Saved per step', 'GPU-hours per month', 'Worth per month'].map(t => h('th', { scope: 'col', className: 'r' }, t)))),
      h('tbody', {}, rows.map(r => h('tr', { className: r === chosen ? 'chosen' : '' }, h('th', { scope: 'row' }, PATTERNS[r.pattern] || r.pattern), h('td', { className: 'wide-only' }, bar(r)),
        h('td', { className: 'r' }, millis(r.direct.step_ms)), h('td', { className: 'r' }, r.staged ? millis(r.staged.step_ms) : '-'), h('td', { className: 'r' }, millis(saved(r))),
        h('td', { className: 'r' }, whole(r.gpu_hours)), h('td', { className: 'r' }, whole(r.gpu_hours * price))))))),
    h('ul', { className: 'legend' }, h('li', {}, h('span', { className: 'block compute' }), 'compute'), h('li', {}, h('span', { className: 'block k-direct' }), 'exchange, direct'), h('li', {}, h('span', { className: 'block k-staged' }), 'exchange, staged')),
    h('details', { className: 'data' }, h('summary', {}, 'Assumptions'), h('ul', { className: 'plain' }, answer.assumptions.map(a => h('li', {}, a)))));
}

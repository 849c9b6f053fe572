// Tab "Findings": what the doctor found, most severe first.
import { fixList, h, put } from './util.js';

const LEVELS = { error: 'Error', warning: 'Warning', unknown: 'Unknown', info: 'Info' };
const MANY = { error: 'errors', warning: 'warnings', unknown: 'unknown', info: 'info' };
const EFFECTS = { blocks: 'GPUDirect is off for these devices', slows: 'GPUDirect is slower than possible', stages: 'A library does not use GPUDirect', nothing: '' };

export function showFindings(host, data) {
  const { findings } = data.doctor;
  const chosen = new Set(Object.keys(LEVELS));
  const list = h('div', { className: 'findings' });
  const bar = h('div', { className: 'filters', role: 'group', 'aria-label': 'Severity' }, Object.entries(LEVELS).map(([id, name]) => {
    const total = findings.filter(f => f.severity === id).length;
    if (!total) return null;
    const box = h('input', { type: 'checkbox', checked: true, name: `level-${id}` });
    box.addEventListener('change', () => { if (box.checked) chosen.add(id); else chosen.delete(id); render(); });
    return h('label', { className: 'check' }, box, h('span', { className: `badge s-${id}` }, `${total} ${total > 1 ? MANY[id] : name.toLowerCase()}`));
  }));
  const render = () => put(list, findings.filter(f => chosen.has(f.severity)).map(finding));
  const verdict = data.doctor.direct_is_lost
    ? 'At least one pair of GPU and adapter could be direct and is not.'
    : data.doctor.verdicts.length ? 'Every pair that can be direct is direct.' : 'There is no pair of GPU and RDMA adapter to judge.';
  put(host, h('div', { className: 'head-row' }, h('p', { className: 'lead' }, verdict), bar),
    findings.length ? list : h('p', { className: 'empty' }, 'The doctor found nothing to report.'));
  render();
}

function finding(f) {
  return h('article', { className: `finding f-${f.severity}` },
    h('header', {}, h('span', { className: `badge s-${f.severity}` }, LEVELS[f.severity] || f.severity), h('h2', {}, f.title)),
    h('p', {}, f.why),
    h('div', { className: 'finding-body' },
      f.fix_parts.length ? h('section', {}, h('h3', {}, 'Fix',
        (f.needs_root || f.needs_reboot) && h('span', { className: 'muted' }, ` (needs ${[f.needs_root && 'root', f.needs_reboot && 'a reboot'].filter(Boolean).join(' and ')})`)),
      fixList(f.fix_parts)) : null,
      h('section', {}, f.evidence.length ? [h('h3', {}, 'Evidence'), h('ul', { className: 'evidence' }, f.evidence.map(e => h('li', {}, h('span', { className: 'muted' }, e.source), h('code', {}, e.value))))] : null,
        h('dl', { className: 'facts small' },
          EFFECTS[f.effect] ? [h('dt', {}, 'Effect'), h('dd', {}, EFFECTS[f.effect])] : null,
          f.cost ? [h('dt', {}, 'Cost'), h('dd', {}, f.cost)] : null,
          f.under ? [h('dt', {}, 'Part of'), h('dd', {}, h('code', {}, f.under))] : null,
          f.library ? [h('dt', {}, 'Concerns'), h('dd', {}, f.library)] : null,
          f.devices.length ? [h('dt', {}, 'Devices'), h('dd', { className: 'mono' }, f.devices.join(', '))] : null,
          h('dt', {}, 'Check'), h('dd', {}, h('code', {}, f.id))))));
}

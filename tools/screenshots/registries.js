// What the Grafana application fills in and the bare libraries lack: transformers, and the standard field options.
// Without the options, units and thresholds would be dropped without a word.
import { FieldConfigOptionsRegistry, standardTransformers, standardTransformersRegistry } from '@grafana/data';

const OPTIONS = ['unit', 'min', 'max', 'decimals', 'displayName', 'color', 'mappings', 'thresholds', 'links', 'noValue',
  'description', 'filterable'];

export function registerTransformers() {
  const byId = new Map(Object.values(standardTransformers).map(transformer => [transformer.id, transformer]));
  standardTransformersRegistry.setInit(() => [...byId.values()].map(transformer => ({
    id: transformer.id, name: transformer.name, defaultOptions: transformer.defaultOptions,
    transformation: async () => transformer, editor: () => null,
  })));
}

/** Every option that a panel's field configuration names. */
export function optionsOf({ defaults, overrides }) {
  const custom = new Set(Object.keys(defaults.custom ?? {}));
  for (const { id } of overrides.flatMap(override => override.properties)) {
    if (id.startsWith('custom.')) custom.add(id.slice('custom.'.length));
  }
  const option = (path, isCustom) => ({
    id: isCustom ? `custom.${path}` : path, path, name: path, isCustom,
    process: value => value, shouldApply: () => true, getItemsCount: () => 0, editor: () => null, override: () => null,
  });
  return new FieldConfigOptionsRegistry(() => [
    ...OPTIONS.map(path => option(path, false)), ...[...custom].map(path => option(path, true))]);
}

/** The configuration with what Grafana takes for granted; JSON cannot say −Infinity, where the first step begins. */
export function completed(panel) {
  const given = panel.fieldConfig ?? {};
  const mode = panel.type === 'timeseries' ? 'palette-classic' : 'thresholds';
  const defaults = {
    color: { mode }, thresholds: { mode: 'absolute', steps: [{ value: null, color: 'green' }] }, ...given.defaults };
  const steps = defaults.thresholds.steps.map(step => ({ ...step, value: step.value ?? -Infinity }));
  return { defaults: { ...defaults, thresholds: { ...defaults.thresholds, steps } }, overrides: given.overrides ?? [] };
}

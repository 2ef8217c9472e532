// Package otellimit reports decisions of limits to OpenTelemetry: metrics, and spans of callers.
//
//	observer, err := otellimit.New(nil)
//	if err != nil {
//		return err
//	}
//	store, err := pgstore.New(pool, &pgstore.Config{Observe: observer.Observe})
//	if err != nil {
//		return err
//	}
//	_, err = observer.Watch(store) // the tokens that it holds in memory
//
// The names are [MetricRequests] and those that follow it. No metric has a key as an attribute:
// a policy is a limit's name, of which a program has a few.
package otellimit

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/fallback"
	"github.com/pgratelimit/ratelimit/internal/parked"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Config configures an [Observer]. Its zero value holds the defaults.
type Config struct {
	// MeterProvider receives metrics. The default is that of package otel.
	MeterProvider metric.MeterProvider

	// TracerProvider receives a span for each decision, with its time, as a child of the span in
	// its caller's context, also when it shared a statement. The default, nil, makes no spans.
	TracerProvider trace.TracerProvider

	// Keys puts the key into spans. It is often a person's address or a secret, so the default is
	// false.
	Keys bool
}

// Observer reports events to OpenTelemetry. It is safe for concurrent use.
type Observer struct {
	config Config
	meter  metric.Meter
	tracer trace.Tracer // nil without spans

	requests, retries, errors, doors metric.Int64Counter
	permits, released                metric.Int64Counter
	tokens, returned                 metric.Float64Counter
	duration, queued, wait           metric.Float64Histogram
	batch                            metric.Int64Histogram
	labels                           sync.Map // from label to metric.MeasurementOption, which takes longer to make than to count
	many                             atomic.Int64
}

// New returns an Observer. A nil config holds the defaults. Errors are the meter's.
func New(config *Config) (*Observer, error) {
	o := &Observer{}
	if config != nil {
		o.config = *config
	}
	if o.config.MeterProvider == nil {
		o.config.MeterProvider = otel.GetMeterProvider()
	}
	if o.config.TracerProvider != nil {
		o.tracer = o.config.TracerProvider.Tracer(scope)
	}
	o.meter = o.config.MeterProvider.Meter(scope)
	return o, o.instruments()
}

func (o *Observer) instruments() error {
	var all []error
	counter := func(of *metric.Int64Counter, name, unit, what string) {
		c, err := o.meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(what))
		*of, all = c, append(all, err)
	}
	amount := func(of *metric.Float64Counter, name, what string) {
		c, err := o.meter.Float64Counter(name, metric.WithUnit("{token}"), metric.WithDescription(what))
		*of, all = c, append(all, err)
	}
	times := func(of *metric.Float64Histogram, name, what string, bounds []float64) {
		h, err := o.meter.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(what), metric.WithExplicitBucketBoundaries(bounds...))
		*of, all = h, append(all, err)
	}
	counter(&o.requests, MetricRequests, "{request}", "What limits were asked.")
	counter(&o.retries, MetricRetries, "{retry}", "Statements and transactions that were run again since PostgreSQL asked for that.")
	counter(&o.errors, MetricErrors, "{error}", "Calls that ended with an error.")
	counter(&o.doors, MetricDoor, "{request}", "What middlewares have made of requests and jobs.")
	counter(&o.permits, MetricPermits, "{permit}", "Permits that were acquired.")
	counter(&o.released, MetricPermitsReleased, "{permit}", "Permits that were released.")
	amount(&o.tokens, MetricTokens, "Tokens that were taken.")
	amount(&o.returned, MetricTokensReturned, "Tokens that were given back.")
	times(&o.duration, MetricDuration, "How long decisions took.", seconds)
	times(&o.queued, MetricQueued, "How long calls waited in their process.", seconds)
	times(&o.wait, MetricWait, "The wait that was told.", waits)
	var err error
	o.batch, err = o.meter.Int64Histogram(MetricBatch, metric.WithUnit("{request}"),
		metric.WithDescription("With how many calls each call shared its statement."), metric.WithExplicitBucketBoundaries(sizes...))
	return errors.Join(append(all, err)...)
}

// label holds the attributes of a measurement.
type label struct {
	policy, result, verb, form, class, door string
	passed, shadow                          bool
}

// mostLabels is the number of labels that are kept; others are made each time.
const mostLabels = 10_000

func (o *Observer) of(l label) metric.MeasurementOption {
	if known, ok := o.labels.Load(l); ok {
		return known.(metric.MeasurementOption)
	}
	var attrs []attribute.KeyValue
	add := func(name, value string) {
		if value != "" {
			attrs = append(attrs, attribute.String(name, text(value)))
		}
	}
	add(AttrPolicy, l.policy)
	add(AttrResult, l.result)
	add(AttrVerb, l.verb)
	add(AttrForm, l.form)
	add(AttrError, l.class)
	if l.door != "" {
		attrs = append(attrs, attribute.String(AttrDoor, l.door), attribute.Bool(AttrPassed, l.passed), attribute.Bool(AttrShadow, l.shadow))
	}
	made := metric.WithAttributeSet(attribute.NewSet(attrs...))
	if o.many.Add(1) <= mostLabels {
		o.labels.Store(l, made)
	}
	return made
}

// text returns a string that exporters can encode. Names have at most 255 bytes.
func text(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	return "invalid UTF-8"
}

// Observe is for Config.Observe of stores and middlewares. Pass it to both: a middleware's events
// are counted by [MetricDoor] alone.
func (o *Observer) Observe(ctx context.Context, e ratelimit.Event) {
	policy, verb, form := e.Policy(), string(e.Verb), string(e.Form)
	if e.Door != "" {
		o.doors.Add(ctx, 1, o.of(label{policy: policy, result: string(e.Outcome), verb: verb, door: e.Door, passed: e.Passed, shadow: e.Shadow}))
		return
	}
	if e.Err != nil {
		o.errors.Add(ctx, 1, o.of(label{policy: policy, verb: verb, class: e.ErrorClass}))
	}
	if e.Retries > 0 {
		o.retries.Add(ctx, int64(e.Retries), o.of(label{policy: policy, form: form}))
	}
	o.count(ctx, &e)
	if e.Took > 0 {
		o.duration.Record(ctx, e.Took.Seconds(), o.of(label{policy: policy, result: string(e.Outcome), verb: verb, form: form}))
		if e.Verb.Takes() && e.Form != ratelimit.FormTx {
			o.queued.Record(ctx, e.Queued.Seconds(), o.of(label{policy: policy, form: form}))
		}
	}
	if e.Batch > 0 {
		o.batch.Record(ctx, int64(e.Batch), o.of(label{}))
	}
	if o.tracer != nil {
		o.span(ctx, &e)
	}
}

// count counts the calls of each limit, and the tokens.
func (o *Observer) count(ctx context.Context, e *ratelimit.Event) {
	verb, form := string(e.Verb), string(e.Form)
	if e.Permit != nil {
		for _, p := range e.Permit.Parts() {
			o.requests.Add(ctx, 1, o.of(label{policy: p.InFlight.Name, result: string(e.Outcome), verb: verb, form: form}))
			of, n := o.of(label{policy: p.InFlight.Name}), int64(1+len(p.More))
			switch {
			case e.Outcome == ratelimit.OutcomeGranted && e.Verb == ratelimit.VerbAcquire:
				o.permits.Add(ctx, n, of)
			case e.Outcome == ratelimit.OutcomeGranted && e.Verb == ratelimit.VerbRelease:
				o.released.Add(ctx, n, of)
			}
		}
		return
	}
	switch {
	case e.Verb == ratelimit.VerbSettle || e.Verb == ratelimit.VerbCancel:
		if e.Outcome == ratelimit.OutcomeGranted {
			o.settled(ctx, e)
		}
		return
	case e.Verb == ratelimit.VerbCredit && e.Outcome == ratelimit.OutcomeGranted:
		for p := range e.Each() {
			o.returned.Add(ctx, p.Status.Request.Count, o.of(label{policy: p.Name()}))
		}
		return
	case !e.Verb.Takes():
		return
	}
	for p := range e.Each() {
		o.requests.Add(ctx, 1, o.of(label{policy: p.Name(), result: string(p.Outcome), verb: verb, form: form}))
		if e.Outcome == ratelimit.OutcomeGranted && p.Status.Taken > 0 { // also where a limit in shadow would have refused
			o.tokens.Add(ctx, p.Status.Taken, o.of(label{policy: p.Name()}))
		}
		if wait := p.Status.RetryAfter; wait > 0 && p.Outcome != ratelimit.OutcomeWithheld && p.Outcome != ratelimit.OutcomeShadowed {
			o.wait.Record(ctx, wait.Seconds(), o.of(label{policy: p.Name(), result: string(p.Outcome)}))
		}
	}
}

// settled counts the tokens that a settlement gave back or took in addition.
func (o *Observer) settled(ctx context.Context, e *ratelimit.Event) {
	back := make(map[string]float64)
	for _, r := range e.Requests {
		back[ratelimit.NameOf(r.Limit)] += r.Count
	}
	for _, s := range e.Result.Each() {
		back[ratelimit.NameOf(s.Request.Limit)] -= s.Taken
	}
	for name, n := range back {
		if n > 0 {
			o.returned.Add(ctx, n, o.of(label{policy: name}))
		} else if n < 0 {
			o.tokens.Add(ctx, -n, o.of(label{policy: name}))
		}
	}
}

// span reports a decision in its caller's trace.
func (o *Observer) span(ctx context.Context, e *ratelimit.Event) {
	now := time.Now()
	_, span := o.tracer.Start(ctx, "ratelimit "+string(e.Verb), trace.WithTimestamp(now.Add(-e.Took)), trace.WithSpanKind(trace.SpanKindInternal))
	if span.IsRecording() {
		attrs := []attribute.KeyValue{
			attribute.String(AttrPolicy, text(e.Policy())), attribute.String(AttrResult, string(e.Outcome)), attribute.String(AttrForm, string(e.Form)),
			attribute.Float64(MetricQueued, e.Queued.Seconds()), attribute.Float64(MetricWait, e.Result.RetryAfter.Seconds()),
			attribute.Int(MetricBatch, e.Batch), attribute.Int(MetricRetries, e.Retries),
		}
		if e.ErrorClass != "" {
			attrs = append(attrs, attribute.String(AttrError, e.ErrorClass))
			span.SetStatus(codes.Error, e.ErrorClass)
		}
		if o.config.Keys {
			var keys []string
			for p := range e.Each() {
				keys = append(keys, text(p.Status.Request.Key))
			}
			attrs = append(attrs, attribute.StringSlice(AttrKey, keys))
		}
		span.SetAttributes(attrs...)
	}
	span.End(trace.WithTimestamp(now))
}

// observable is an instrument that is read at every collection: a gauge, or a counter.
type observable struct {
	name, unit, what string
	counts           bool
}

// watch has read called at every collection, until the Registration's Unregister. put records a value of
// the i-th instrument.
func (o *Observer) watch(read func(ctx context.Context, put func(i int, value float64, of label)) error, all ...observable) (metric.Registration, error) {
	instruments := make([]metric.Float64Observable, len(all))
	observables := make([]metric.Observable, len(all))
	for i, a := range all {
		var err error
		if a.counts {
			instruments[i], err = o.meter.Float64ObservableCounter(a.name, metric.WithUnit(a.unit), metric.WithDescription(a.what))
		} else {
			instruments[i], err = o.meter.Float64ObservableGauge(a.name, metric.WithUnit(a.unit), metric.WithDescription(a.what))
		}
		if err != nil {
			return nil, err
		}
		observables[i] = instruments[i]
	}
	return o.meter.RegisterCallback(func(ctx context.Context, to metric.Observer) error {
		return read(ctx, func(i int, value float64, of label) { to.ObserveFloat64(instruments[i], value, o.of(of)) })
	}, observables...)
}

// Watch reports the tokens that a store holds in memory at every collection, until the
// Registration's Unregister.
func (o *Observer) Watch(store interface{ Stats() pgstore.Stats }) (metric.Registration, error) {
	return o.watch(func(_ context.Context, put func(int, float64, label)) error {
		for _, h := range store.Stats().Held {
			put(0, h.Tokens, label{policy: h.Limit})
		}
		return nil
	}, observable{name: MetricHeld, unit: "{token}", what: "Tokens that the process holds in its memory."})
}

// WatchTable asks the database at every collection for the old row versions that it keeps and for
// the oldest snapshot, until the Registration's Unregister: see [pgstore.Versions]. One process
// with the role pg_read_all_stats is enough.
func (o *Observer) WatchTable(store interface {
	Versions(context.Context) (pgstore.Versions, error)
},
) (metric.Registration, error) {
	return o.watch(func(ctx context.Context, put func(int, float64, label)) error {
		v, err := store.Versions(ctx)
		if err == nil {
			put(0, float64(v.Dead), label{})
			put(1, float64(v.Since), label{})
		}
		return err
	}, observable{name: MetricDead, unit: "{version}", what: "Old versions of rows that PostgreSQL keeps."},
		observable{name: MetricSnapshot, unit: "{transaction}", what: "Transactions that have begun since the oldest snapshot."})
}

// WatchLines asks the database at every collection how many jobs of River wait in line for the
// permits of each limit, and since when, until the Registration's Unregister. It reads the whole
// table of parked jobs; one process is enough. Without that table there are none.
func (o *Observer) WatchLines(store interface {
	Pool() *pgxpool.Pool
	Schema() string
},
) (metric.Registration, error) {
	return o.watch(func(ctx context.Context, put func(int, float64, label)) error {
		lines, err := parked.Totals(ctx, store.Pool(), store.Schema())
		for name, line := range lines {
			put(0, float64(line.Jobs), label{policy: name})
			put(1, time.Since(line.Since).Seconds(), label{policy: name})
		}
		return err
	}, observable{name: MetricParked, unit: "{job}", what: "Jobs of River that wait in line for a permit."},
		observable{name: MetricParkedAge, unit: "s", what: "How long the first of them has waited."})
}

// WatchCatalog reports the age of a *catalog.Catalog at every collection, until the Registration's
// Unregister.
func (o *Observer) WatchCatalog(c interface{ Age() time.Duration }) (metric.Registration, error) {
	return o.watch(func(_ context.Context, put func(int, float64, label)) error {
		put(0, c.Age().Seconds(), label{})
		return nil
	}, observable{name: MetricCatalogAge, unit: "s", what: "Since when the process has not heard of the catalog."})
}

// WatchFallback reports at every collection whether a *fallback.Store knows that its database is
// silent, until the Registration's Unregister.
func (o *Observer) WatchFallback(store interface{ Stats() fallback.Stats }) (metric.Registration, error) {
	return o.watch(func(_ context.Context, put func(int, float64, label)) error {
		stats, silent := store.Stats(), 0.0
		if stats.Silent {
			silent = 1
		}
		put(0, silent, label{})
		put(1, float64(stats.Silences), label{})
		put(2, float64(stats.Busy), label{})
		return nil
	}, observable{name: MetricSilent, what: "1 while the database is silent."},
		observable{name: MetricSilences, unit: "{silence}", what: "Silences of the database that began.", counts: true},
		observable{name: MetricBusy, unit: "{request}", what: "Calls that found all connections of the pool in use.", counts: true})
}

package otellimit_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/otellimit"
)

// Requests are counted by limit and result.
func ExampleObserver_Observe() {
	ctx := context.Background()
	reader := metric.NewManualReader() // a program exports to Prometheus or OTLP
	observer, err := otellimit.New(&otellimit.Config{MeterProvider: metric.NewMeterProvider(metric.WithReader(reader))})
	if err != nil {
		log.Fatal(err)
	}
	store := memstore.NewWithConfig(memstore.Config{Observe: observer.Observe}) // or pgstore.Config
	limit := ratelimit.TokenBucket{Name: "messages", Rate: 2, Period: time.Minute}
	for range 3 {
		if _, err := store.Allow(ctx, limit.For("alice")); err != nil {
			log.Fatal(err)
		}
	}

	var all metricdata.ResourceMetrics
	if err := reader.Collect(ctx, &all); err != nil {
		log.Fatal(err)
	}
	for _, m := range all.ScopeMetrics[0].Metrics {
		if m.Name != otellimit.MetricRequests {
			continue
		}
		for _, point := range m.Data.(metricdata.Sum[int64]).DataPoints {
			result, _ := point.Attributes.Value(otellimit.AttrResult)
			fmt.Println(result.AsString(), point.Value)
		}
	}
	// Unordered output:
	// granted 2
	// refused 1
}

package migrate_test

import (
	"testing"

	"github.com/pgratelimit/ratelimit/internal/leak"
	"github.com/pgratelimit/ratelimit/migrate"
)

func TestNoTypeShowsKeys(t *testing.T) {
	leak.Check(t, ".", map[string]any{
		"Config": migrate.Config{Schema: "s"}, "Migration": applied[0], "SchemaError": migrate.SchemaError{Fault: "schema lacks", Mend: "psql"},
	})
}

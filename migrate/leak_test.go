package migrate_test

import (
	"testing"

	"github.com/pgratelimit/ratelimit/internal/leak"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrate"
)

func TestNoTypeShowsKeys(t *testing.T) {
	leak.Check(t, ".", map[string]any{
		"Config": migrate.Config{Schema: "s"}, "Migration": applied[0], "SchemaError": migrate.SchemaError{Fault: "schema lacks", Mend: "psql"},
	})
}

func TestNoErrorShowsKeys(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	cfg := &migrate.Config{Schema: db.Schema}
	wantUp(t, db.Pool, cfg, applied)
	execute(t, db.Pool, "INSERT INTO "+db.Schema+".rate_limits VALUES ('l', '"+leak.Key+"', 0, 1, now()); ALTER TABLE "+db.Schema+".rate_limits DROP CONSTRAINT rate_limits_pkey")
	_, err := migrate.Status(t.Context(), db.Pool, cfg)
	leak.Errors(t, ".", map[string]leak.Provoked{"SchemaError": {Err: err}})
}
